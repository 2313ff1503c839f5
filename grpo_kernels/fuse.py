"""A GRPOHead in any causal language model of transformers: the model's own forward runs as it is, but its head makes the loss, not logits.

What surrounds the head then works unchanged, since nothing around it is rebuilt: a mixture's auxiliary loss, caches, adapters, wrappers,
compilers, generation. What a model does to its logits after the head (a scale, a soft cap) is measured where it does it, on known numbers
that pass through its own code once, rather than guessed from the names in its config.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.head import GRPOHead, HeadCall, LowRank
from grpo_kernels.logprobs import LogprobsOutput
from grpo_kernels.options import GRPOLossOutput

__all__ = ["fuse_lm_head", "unfuse_lm_head"]


def fuse_lm_head(model: Any) -> Any:
    """Lets `model(..., lm_head_fn=fn)` compute a loss or log-probs in the place of logits.

    fn is `fused_linear_grpo_loss` or `fused_linear_logprobs` with everything but hidden states and head bound by name in functools.partial
    (there the casts of mixed-precision wrappers, which would round old_logps to bfloat16, do not find them). Where it binds ids (B, T),
    the last T + 1 positions are scored, so prompts are padded on the left; where it binds ids of all positions, or packed ones, all are.
    fn may also be any function of (hidden_states, lm_head_weight, *, bias, logit_scale, logit_softcap) that returns a NamedTuple.

    The output is of the model's own class, with the function's fields (loss, logps, entropy, ...) beside the model's (a mixture's
    `aux_loss`, the cache, ...) and `logits` None. `loss` is the function's; no auxiliary loss is added to it.

    Without lm_head_fn the model is what it was: forward, generate, state_dict, save_pretrained. `unfuse_lm_head` undoes it. A copy is
    fused too; a model that was pickled whole (torch.save(model), a spawned process) has to be fused again.

    Args:
        model: a causal language model of transformers whose output embeddings are an nn.Linear, or its PEFT model. Before or after PEFT
            (LoRA of the body or of the head, the head in modules_to_save); before DDP, fully_shard and torch.compile.

    Returns:
        The same model.

    Raises:
        TypeError: not such a model, or its head is of another class. From the first call with lm_head_fn: the model does to its logits
            what is not a scale and a soft cap; the head's adapter is not plain LoRA.
        ValueError: from a call with labels as well.
        RuntimeError: fused before, and something wrapped the model's forward since.

    What a model does to its logits is measured in the first such call, which runs the head twice, reads a few numbers back from the device
    and is not compiled.

    >>> import torch, transformers
    >>> from functools import partial
    >>> from grpo_kernels import fuse_lm_head, fused_linear_grpo_loss
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, pad_token_id=0,
    ... )
    >>> model = fuse_lm_head(transformers.LlamaForCausalLM(config))
    >>> ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])  # two tokens of prompt, two of completion
    >>> loss = partial(fused_linear_grpo_loss, completion_ids=ids[:, 2:], advantages=torch.tensor([1.0, -1.0]))
    >>> out = model(ids, lm_head_fn=loss)
    >>> out.loss.backward()
    >>> out.logps.shape, out.logits, model.lm_head.weight.grad.shape
    (torch.Size([2, 2]), None, torch.Size([32, 8]))
    """
    model = _causal_lm(model)
    modules: list[Any] = _linears(model.get_output_embeddings())
    for module in modules:
        if isinstance(module, GRPOHead):
            continue
        if type(module) is not nn.Linear:
            raise TypeError(
                f"model: expected its output embeddings to be a torch.nn.Linear, got {type(module).__name__}"
                + ("; fuse before sharding" if isinstance(module, nn.Linear) else "")
            )
        _become(module, GRPOHead)
    if not _is_fused(model):
        if "forward" in vars(model):  # another patch. On the model, so that a copy of the model has its own
            model._forward_before_fusion = model.forward
        model.forward = model._fused_forward = types.MethodType(_fused_forward(model), model)
    return model


def unfuse_lm_head(model: Any) -> Any:
    """Undoes `fuse_lm_head` and returns the model.

    >>> import transformers
    >>> from grpo_kernels import fuse_lm_head, unfuse_lm_head
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=32, n_positions=8))
    >>> unfuse_lm_head(fuse_lm_head(model)).lm_head
    Linear(in_features=8, out_features=32, bias=False)

    Raises:
        RuntimeError: not fused; or something wrapped the model's forward since, which has to be undone first.
    """
    model = _causal_lm(model)
    if not _is_fused(model):
        raise RuntimeError("model: not fused")
    del model._fused_forward
    before = vars(model).pop("_forward_before_fusion", None)
    if before is None:
        del model.forward
    else:
        model.forward = before
    for module in _linears(model.get_output_embeddings()):
        if type(module) is GRPOHead:
            _become(module, nn.Linear)
            for name in ("logit_scale", "logit_softcap"):
                vars(module).pop(name, None)
    return model


def _causal_lm(model: Any) -> Any:
    if hasattr(model, "get_base_model"):  # PEFT
        model = model.get_base_model()
    if not (isinstance(model, nn.Module) and hasattr(type(model), "get_output_embeddings")):
        raise TypeError(
            f"model: expected a causal language model of transformers, got {type(model).__name__}; fuse before wrapping or compiling it"
        )
    return model


def _is_fused(model: Any) -> bool:
    forward, fused = vars(model).get("forward"), vars(model).get("_fused_forward")
    if fused is not None and fused.__func__ is type(model).forward:  # unpickled: pickle finds a method by its name, and the class has that
        del model._fused_forward
        if forward == fused:
            del model.forward
        return False
    if fused is not None and forward != fused:
        raise RuntimeError(
            "model: fused, but something wrapped or replaced its forward since; undo that first "
            "(accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
        )
    return fused is not None


def _become(module: Any, kind: type[nn.Linear]) -> None:
    """Of another class, but the same module: its Parameter stays tied, its hooks stay on."""
    module.__class__ = kind
    if "_old_forward" in vars(module):  # accelerate's device hooks call the forward that they found
        module._old_forward = types.MethodType(kind.forward, module)


def _fused_forward(model: Any) -> Callable[..., Any]:
    first_call = torch.compiler.disable(_first_call)  # here, since torch imports its compiler for it

    def forward(self: Any, *args: Any, lm_head_fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        if lm_head_fn is None:
            return _forward(self, *args, **kwargs)
        if kwargs.get("labels") is not None:
            raise ValueError("labels: the loss of labels needs logits, which lm_head_fn does away with; pass one of the two")
        outer = self.get_output_embeddings()
        head, low_rank = _active_head(outer)
        kwargs["return_dict"] = True
        if head.logit_scale is None:
            return first_call(self, outer, head, HeadCall(lm_head_fn, low_rank), args, kwargs)
        call = HeadCall(lm_head_fn, low_rank)
        output = _with_call(outer, head, call, functools.partial(_forward, self, *args, **kwargs))
        return _joined(output, call)

    # generate and trainers read the signature of a model's forward. Not by __wrapped__, which accelerate's unwrap_model follows to its end
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    return forward


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    before = getattr(model, "_forward_before_fusion", None)
    return type(model).forward(model, *args, **kwargs) if before is None else before(*args, **kwargs)


def _with_call(outer: Any, head: GRPOHead, call: HeadCall, act: Callable[[], Any]) -> Any:
    """act()'s result; the head does `call` the first time that it is called inside."""
    adapted = bool(call.low_rank)
    head.next_call = call  # taken by the head's forward
    if adapted:  # the head adds what its adapter would
        outer._disable_adapters = True
    try:
        output = act()
    finally:
        head.next_call = None
        if adapted:
            outer._disable_adapters = False
    if call.hidden_states is None and call.carrier is None:
        raise RuntimeError("lm_head_fn: the model's forward did not call its output embeddings, or something replaced their forward")
    return output


# --- what the model does to logits after the head ---------------------------------------------------------------------------------------


def _first_call(model: Any, outer: Any, head: GRPOHead, call: HeadCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's forward once with known numbers as logits, then the head with the hidden states that it saw."""
    stand_in = _known_logits(head.weight)
    looking = HeadCall(None, call.low_rank, stand_in.clone())
    output = _with_call(outer, head, looking, functools.partial(_forward, model, *args, **kwargs))
    head.logit_scale, head.logit_softcap = _measured(stand_in, getattr(output, "logits", None), looking.stand_in)
    _with_call(outer, head, call, functools.partial(outer, looking.hidden_states))
    for result in (GRPOLossOutput, LogprobsOutput):  # now, since a compiler cannot make the class that it meets first
        _output_type(type(output), result._fields)
    return _joined(output, call)


def _known_logits(weight: Tensor) -> Tensor:
    """(1, 5, V), no two columns alike: tiny, where a cap does nothing, middling of both signs, and so large that only a cap is left."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    ramp = torch.linspace(0.5, 1, weight.shape[0], dtype=dtype, device=weight.device)
    return torch.stack([ramp * x for x in (2.0**-20, 64.0, -64.0, 2.0**64, -(2.0**64))])[None]


def _measured(known: Tensor, made: Any, given: Any) -> tuple[float, float | None]:
    """(scale, cap) of cap * tanh(scale * known / cap) == made."""
    problem = "changes their shape" if not isinstance(made, Tensor) or made.shape != known.shape else ""
    if not problem and not torch.equal(known, given):
        problem = "writes over them"
    if not problem:
        made = made.detach().to(known.dtype)
        scale, top = (made[0, 0, 0] / known[0, 0, 0]).item(), made[0, 3, 0].item()
        scale = 1.0 if abs(scale - 1) < 1e-6 else scale  # a cap's own rounding
        linear = scale * known
        cap = None if abs(top) >= 2.0**40 else top
        expected = linear if cap is None else cap * torch.tanh(linear / cap)
        if scale > 0 and (cap is None or cap > 0) and torch.allclose(made, expected, rtol=1e-5, atol=0):
            return scale, cap
        problem = "does more than that"
    raise TypeError(
        f"model: what it does to its logits after the output embeddings has to be a positive scale and a soft cap "
        f"(cap * tanh(logits / cap)), which the loss can follow; this one {problem}. Score its logits instead: fused_grpo_loss"
    )


# --- adapters ---------------------------------------------------------------------------------------------------------------------------


def _linears(outer: Any) -> list[Any]:
    """Every module that may be called as the head: itself, what PEFT keeps of it, what PEFT adapts."""
    if hasattr(outer, "modules_to_save"):
        return [outer.original_module, *outer.modules_to_save.values()]
    return [outer.base_layer if hasattr(outer, "base_layer") else outer]


def _active_head(outer: Any) -> tuple[GRPOHead, Sequence[LowRank]]:
    head, low_rank = outer, []
    if hasattr(outer, "modules_to_save"):
        whole = outer.disable_adapters or not outer.active_adapters
        head = outer.original_module if whole else outer.modules_to_save[outer.active_adapters[0]]
    elif hasattr(outer, "base_layer"):
        head = outer.base_layer
        if not outer.disable_adapters and not outer.merged:
            low_rank = _lora(outer)
    if not isinstance(head, GRPOHead):
        raise TypeError(f"model: its output embeddings became a {type(outer).__name__}; call fuse_lm_head(model) again")
    return head, low_rank


def _lora(outer: Any) -> list[LowRank]:
    """The active adapters of PEFT's LoRA layer."""
    found = []
    for name in outer.active_adapters:
        if not hasattr(outer, "lora_A") or name in getattr(outer, "lora_variant", ()):
            raise TypeError(f"model: the head's adapter {name!r} ({type(outer).__name__}) is not plain LoRA; merge it, or score logits")
        if name in outer.lora_A:
            found.append(LowRank(outer.lora_A[name], outer.lora_B[name], outer.lora_dropout[name], outer.scaling[name]))
    return found


# --- the output -------------------------------------------------------------------------------------------------------------------------


def _joined(output: Any, call: HeadCall) -> Any:
    """The model's output and the function's in one, as a class of the model's own: wrappers take it apart and build it again."""
    fields = call.fields()
    output_type = _output_type(type(output), tuple(fields))
    return output_type(**{**output, "logits": None, **fields})


_OUTPUT_TYPES: dict[tuple[type, tuple[str, ...]], Any] = {}


def _output_type(base: type, names: tuple[str, ...]) -> Any:
    found = _OUTPUT_TYPES.get((base, names))
    return _new_output_type(base, names) if found is None else found


def _new_output_type(base: type, names: tuple[str, ...]) -> Any:
    if not dataclasses.is_dataclass(base) or not issubclass(base, dict):
        raise TypeError(f"model: expected its forward to return a ModelOutput, got {base.__name__}")
    known = {field.name for field in dataclasses.fields(base)}
    new = [(name, Any, dataclasses.field(default=None)) for name in names if name not in known]
    _OUTPUT_TYPES[base, names] = dataclasses.make_dataclass(f"Fused{base.__name__}", new, bases=(base,))
    return _OUTPUT_TYPES[base, names]
