"""TRL's GRPOTrainer with its loss and its log-probs from our kernels: two of its methods overridden, everything else as it is."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels import GRPOLossOutput, fuse_lm_head, fused_linear_logprobs, grpo_loss, unfuse_lm_head
from grpo_kernels.integrations.trl.config import accumulation, left_to_trl, options_of, semantics
from grpo_kernels.integrations.trl.entropy import log_entropy_bonus
from grpo_kernels.integrations.trl.heads import SOURCES, Float32Head
from grpo_kernels.integrations.trl.metrics import log_step

if TYPE_CHECKING:
    from trl import GRPOTrainer as Trainer
else:  # a mixin, and nothing of TRL before it is used
    Trainer = object

__all__ = ["FusedGRPOMixin"]

IMAGES = (  # what TRL adds to the inputs of vision-language models
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids", "mm_token_type_ids",
    "image_position_ids", "pixel_position_ids",
)  # fmt: skip


class FusedGRPOMixin(Trainer):
    """In front of GRPOTrainer, or of a subclass that leaves `_compute_loss` and `_get_per_token_logps_and_entropies` alone:

        class MyFusedTrainer(FusedGRPOMixin, MyTrainer): ...

    Takes the trainer's arguments, and
        loss_from: "hidden_states": logits are never made; "logits": the model makes them, and their gradient takes their place in memory.

    What these kernels do not serve is left to TRL's own code, with one warning that names the options.

    Raises:
        RuntimeError: a version of TRL that is not supported.
        ValueError: an unknown loss_from.
    """

    def __init__(self, *args: Any, loss_from: str = "hidden_states", **kwargs: Any) -> None:
        import trl

        self._semantics = semantics(trl.__version__)
        if loss_from not in SOURCES:
            raise ValueError(f"loss_from: expected one of {', '.join(SOURCES)}, got {loss_from!r}")
        self._head = SOURCES[loss_from]
        self._left_to_trl = False
        _release(kwargs.get("model", args[0] if args else None))
        super().__init__(*args, **kwargs)
        reasons = left_to_trl(self, self._semantics)
        if not reasons:
            try:
                for model in (self.model, self.ref_model):
                    self._fuse(model)
            except TypeError as error:
                reasons = [str(error)]
        if reasons:
            self._leave_to_trl("; ".join(reasons))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self._left_to_trl or self._has_images(inputs):
            return super()._compute_loss(model, inputs)
        if inputs["advantages"].shape[1:] == (1,):  # a subclass's, which TRL would broadcast
            inputs = {**inputs, "advantages": inputs["advantages"][:, 0]}
        ids, mask = inputs["completion_ids"], inputs["completion_mask"] * inputs.get("tool_mask", 1)
        options: dict[str, Any] = {
            **options_of(self, self._semantics, inputs),
            "completion_mask": mask,
            "old_logps": inputs.get("old_per_token_logps"),
            "ref_logps": inputs["ref_per_token_logps"] if self.beta != 0 else None,
        }
        if self.use_vllm and self.vllm_importance_sampling_correction:
            options["importance_weights"] = inputs["importance_sampling_ratio"]
        input_ids = torch.cat([inputs["prompt_ids"], ids], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        forward = functools.partial(self._forward, model, input_ids, attention_mask, getattr(self, "aux_loss_enabled", False))

        coefficient, bonus_mask = options["entropy_coef"], mask
        if self.top_entropy_quantile < 1 or self.off_policy_mask_threshold is not None or self.args.fp16:
            # Masks are made of this forward's own scores; and a GradScaler's factor has to reach the gradient before it is rounded.
            scored = forward(self._head.logprobs, token_ids=ids, mask=mask)
            options["policy_weights"], bonus_mask = self._policy_masks(scored.logps.detach(), scored.entropy.detach(), mask, inputs)
            options["entropy_coef"] = 0.0
            output = grpo_loss(scored.logps, inputs["advantages"], entropy=scored.entropy, **options)
            loss = output.loss - coefficient * self._mean_entropy(scored.entropy, bonus_mask)
        else:
            scored = forward(self._head.loss, completion_ids=ids, advantages=inputs["advantages"], **options)
            output = GRPOLossOutput(*(scored[name] for name in GRPOLossOutput._fields))
            loss = output.loss

        if getattr(self, "_entropy_bonus_enabled", False):
            policy_loss = loss.detach() + coefficient * self._mean_entropy(output.entropy, bonus_mask)
            if "num_items_in_batch" not in options:
                policy_loss = policy_loss * accumulation(self)  # TRL logs these before it divides
            log_entropy_bonus(self, policy_loss, output.entropy, bonus_mask)
        if getattr(self, "aux_loss_enabled", False):
            aux_loss = scored.aux_loss
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulation(self)
            self._metrics[self._mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item())
        log_step(self, self._semantics, inputs, mask, output)
        return loss

    def _get_per_token_logps_and_entropies(  # as TRL 1.16 calls it; 1.0 has no router loss
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, compute_aux_loss: bool = False, **images: Any,
    ) -> Any:  # fmt: skip
        if self._left_to_trl or self._has_images(images):
            if compute_aux_loss:
                images["compute_aux_loss"] = True
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **images
            )
        found = []
        for ids, attention in zip(*(x.split(batch_size or len(x)) for x in (input_ids, attention_mask))):
            completion = {"token_ids": ids[:, -logits_to_keep:], "mask": attention[:, -logits_to_keep:]}
            found.append(self._forward(model, ids, attention, compute_aux_loss, self._head.logprobs, **completion))
        logps = torch.cat([scored.logps for scored in found])
        entropy = torch.cat([scored.entropy for scored in found]) if compute_entropy else None
        if not self._semantics.router_loss:
            return logps, entropy
        return logps, entropy, torch.stack([scored.aux_loss for scored in found]).mean() if compute_aux_loss else None

    def _forward(self, model: Any, input_ids: Tensor, attention_mask: Tensor, router_loss: bool, function: Any, **arguments: Any) -> Any:
        """The output of the wrapped model, whose head has computed the function of the last tokens instead of logits."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if router_loss:
            inputs["output_router_logits"] = True
        with self.accelerator.autocast():
            return model(**inputs, lm_head_fn=functools.partial(function, temperature=self.temperature, **arguments))

    def _policy_masks(self, logps: Tensor, entropy: Tensor, mask: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The factor of the policy term, by the trainer's own methods, and the tokens that the entropy bonus runs over."""
        factor, bonus_mask = torch.ones_like(logps), mask
        if self.top_entropy_quantile < 1:
            top = self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile)
            factor, bonus_mask = factor * top, mask * top
        if self.off_policy_mask_threshold is not None:
            advantages, old = inputs["advantages"], inputs.get("old_per_token_logps")
            factor = factor * self.get_off_policy_mask(
                advantages=advantages if advantages.dim() == 2 else advantages[:, None],
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", logps if old is None else old),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        return factor, bonus_mask

    def _mean_entropy(self, entropy: Tensor, mask: Tensor) -> Tensor:
        return (entropy * mask).sum() / mask.sum().clamp(min=1) / accumulation(self)

    @property
    def _mode(self) -> str:
        model: Any = self.model
        return "train" if model.training else "eval"

    def _fuse(self, model: Any) -> None:
        """Gives the model a head that computes what it is told to."""
        if model is None:
            return
        # off comes what accelerate has put around a reference's forward already: autocast, which `_forward` has, and float32 outputs
        model = self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        head = model.get_output_embeddings()
        if getattr(self.args, "cast_lm_head_to_fp32", False):
            vars(head).pop("forward", None)  # TRL's way of casting
            head.__class__ = Float32Head
        fuse_lm_head(model)
        # What the model does to its logits after the head is found out now, or this raises; without dropout, which would use up random
        # numbers that the rollouts get in TRL.
        training, ids = model.training, torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
        with torch.no_grad():
            model.eval()(input_ids=ids, use_cache=False, lm_head_fn=functools.partial(fused_linear_logprobs, token_ids=ids))
        model.train(training)

    def _has_images(self, inputs: dict[str, Any]) -> bool:
        if all(inputs.get(name) is None for name in IMAGES):
            return False
        self._leave_to_trl("images: the inputs of vision-language models")
        return True

    def _leave_to_trl(self, reasons: str) -> None:
        if not self._left_to_trl:
            warnings.warn(f"{type(self).__name__} leaves the loss to TRL's own code: {reasons}", stacklevel=2)
        self._left_to_trl = True


def _release(model: Any) -> None:
    """Takes off what an earlier trainer has left around this model's forward, before TRL puts its own around that."""
    if isinstance(model, torch.nn.Module):
        from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]

        with contextlib.suppress(RuntimeError, TypeError):  # most models are new
            unfuse_lm_head(extract_model_from_parallel(model, keep_fp32_wrapper=False))
