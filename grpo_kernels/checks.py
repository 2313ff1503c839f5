"""What may come in: shapes, dtypes, devices and ranges, checked once at the public functions, each error naming the argument.

Below the public functions these are facts. Nothing here looks at the values of a tensor, so nothing here synchronises or breaks a graph.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grpo_kernels.rows import Sequences

__all__ = [
    "Count",
    "check_backend",
    "check_count",
    "check_cu_seqlens",
    "check_hidden_states",
    "check_logits",
    "check_number",
    "known_options",
    "mask_rows",
    "per_token",
    "plain_tensor",
    "stats_dtype",
    "temperatures",
]

Count = float | Tensor | None  # a number of tokens or sequences; a 0-d tensor is never synchronised

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IDS = (torch.int64, torch.int32)


def plain_tensor(name: str, x: Any, recipe: str = "") -> Tensor:
    """x, if it is a tensor whose memory holds its values; else a TypeError with the recipe."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if type(x) not in (Tensor, torch.nn.Parameter, FakeTensor):
        recipe = recipe or "pass x.full_tensor() of a DTensor, x.as_subclass(torch.Tensor) of another"
        raise TypeError(f"{name}: expected a plain torch.Tensor, got the subclass {type(x).__name__}; {recipe}")
    if x.layout != torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")
    return x


def check_logits(logits: Any, token_ids: Any, ids_name: str, *, packed: bool = False) -> None:
    """logits (B, T, V) or (B, T + 1, V) and integer ids (B, T); or packed, (N, V) or (1, N, V), and (N,). Contiguous over V.

    `packed`: cu_seqlens stand beside, so ids (1, N) are packed too, and packed rows have no spare position.
    """
    _check_scored("logits", "V", logits, token_ids, ids_name, packed)
    shape = tuple(logits.shape)
    if shape[-1] == 0:
        raise ValueError(f"logits: expected at least one column, got shape {shape}")
    if shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(
            f"logits: expected the vocabulary to be contiguous (stride 1), got strides {logits.stride()} for shape {shape}; "
            f"call .contiguous(), or keep the vocabulary last when making the view"
        )


def check_hidden_states(hidden_states: Any, weight: Any, bias: Any, token_ids: Any, ids_name: str, *, packed: bool = False) -> None:
    """hidden_states as `check_logits` takes logits, of any strides and D columns, beside a head's weight (V, D) and bias (V,)."""
    _check_scored("hidden_states", "D", hidden_states, token_ids, ids_name, packed)
    _check_head("lm_head_weight", weight, "(V, D) beside hidden states of {} columns", hidden_states.shape[-1], 2, hidden_states)
    if bias is not None:
        _check_head("bias", bias, "(V,) beside a weight of {} rows", len(weight), 1, hidden_states)


def _check_head(name: str, x: Any, expected: str, size: int, dims: int, like: Tensor) -> None:
    plain_tensor(name, x, _SHARDED)
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {x.dtype}")
    if x.dim() != dims or x.shape[-1] != size or x.numel() == 0:
        raise ValueError(f"{name}: expected {expected.format(size)}, got shape {tuple(x.shape)}")
    _same_device(name, x, like)


_SHARDED = (
    "a head that FSDP or tensor parallelism shards has to be gathered inside its own module's forward, or the gradient that other ranks "
    "have for it is lost without an error: let grpo_kernels.GRPOHead own it; x.as_subclass(torch.Tensor) of another subclass"
)


def _check_scored(name: str, last: str, x: Any, token_ids: Any, ids_name: str, packed: bool) -> None:
    """x (B, T, last) or with a spare position (B, T + 1, last), or packed, beside integer ids."""
    plain_tensor(name, x)
    plain_tensor(ids_name, token_ids)
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {x.dtype}")
    if token_ids.dtype not in _IDS:
        raise TypeError(f"{ids_name}: expected int64 or int32, got {token_ids.dtype}")
    shape, ids_shape = tuple(x.shape), tuple(token_ids.shape)
    if len(ids_shape) == 1:
        fits, expected = shape[:-1] in (ids_shape, (1, *ids_shape)), f"{name} (N, {last}) or (1, N, {last}) beside (N,)"
    else:
        spare = (0,) if packed else (0, 1)
        fits = len(shape) == 3 and len(ids_shape) == 2 and shape[0] == ids_shape[0] and shape[1] - ids_shape[1] in spare
        padded = f"{name} (B, T, {last}) or (B, T + 1, {last}) beside (B, T)"
        expected = f"packed {name} (1, N, {last}) beside (1, N)" if packed else padded
    if not fits:
        raise ValueError(f"{ids_name}: expected {expected}, got {name} {shape} beside {ids_shape}")
    _same_device(ids_name, token_ids, x)


def check_cu_seqlens(cu_seqlens: Any, like: Tensor) -> None:
    """(S + 1,) int32 or int64 offsets; that they ascend from 0 within the rows is checked by the operator."""
    plain_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in _IDS:
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens: expected (S + 1,) offsets, got shape {tuple(cu_seqlens.shape)}")
    _same_device("cu_seqlens", cu_seqlens, like)


def stats_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of everything per token: float32, and float64 for float64 logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def per_token(
    name: str,
    x: Any,
    sequences: Sequences,
    like: Tensor,
    dtype: torch.dtype,
    *,
    per_sequence: bool = False,
    column: bool = False,
) -> Tensor:
    """x as a contiguous constant of `dtype`, one value a token, on the device of `like`.

    One value a token is always taken, (B, T), or (N,) and (1, N) where packed; one a sequence, (B,) or (S,), with `per_sequence`, and
    there (B, 1) with `column`. Nothing else broadcasts: a shape that fits by accident must not be an answer.
    """
    plain_tensor(name, x)
    if x.is_complex() or (dtype == torch.int64 and x.dtype not in _IDS):
        raise TypeError(f"{name}: expected {'int64 or int32' if dtype == torch.int64 else 'a real dtype'}, got {x.dtype}")
    if x.requires_grad:
        raise ValueError(f"{name}: is a constant of the loss and must not require grad; pass {name}.detach()")
    _same_device(name, x, like)
    shape, given = tuple(sequences.shape), tuple(x.shape)
    x = _saved(x.detach().to(dtype))
    if per_sequence and sequences.known:
        if given == (sequences.count,):
            return sequences.spread(x).contiguous()
        if column and given == (sequences.count, 1):
            return sequences.spread(x[:, 0]).contiguous()
    if given == shape or (len(shape) == 1 and given == (1, *shape)):
        return x.reshape(shape).contiguous()
    allowed = [shape, *[(sequences.count,)] * per_sequence * sequences.known, *[(sequences.count, 1)] * column * sequences.known]
    raise ValueError(f"{name}: expected shape {' or '.join(map(str, dict.fromkeys(allowed)))}, got {given}")


def _saved(x: Tensor) -> Tensor:
    """x as autograd can save it for the backward: ids and masks of a rollout under inference_mode cannot be."""
    return x.clone() if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled() else x


def mask_rows(name: str, mask: Any, sequences: Sequences, like: Tensor) -> Tensor | None:
    """One `active` byte a row: any non-zero value counts as 1; None, all rows, stays None. Packed rows of no sequence are inactive."""
    member = None if sequences.index is None else sequences.index < sequences.count
    if mask is None:
        return None if member is None else member.to(torch.uint8)
    plain_tensor(name, mask)
    active = per_token(name, mask.detach() != 0, sequences, like, torch.uint8)
    return active if member is None else active * member


def temperatures(temperature: Any, sequences: Sequences, like: Tensor, dtype: torch.dtype) -> Tensor:
    """One temperature a row, from a number, one a sequence or one a token. The values of a tensor are checked by the operator."""
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        return per_token("temperature", temperature, sequences, like, dtype, per_sequence=True)
    if isinstance(temperature, Tensor):
        return per_token("temperature", temperature.expand(sequences.shape), sequences, like, dtype)
    # a sum, since torch.compile takes the value of a torch.full for a constant
    return torch.zeros(sequences.shape, dtype=dtype, device=like.device) + check_number("temperature", temperature, above=0)


def check_number(name: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """value as a finite float, > `above` or >= `least` where given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    wanted = "a finite number" + (f" > {above}" if above is not None else f" >= {least}" if least is not None else "")
    # comparisons, not math.isfinite: torch.compile may have made the number a run-time one
    if not (-math.inf < value < math.inf) or (above is not None and value <= above) or (least is not None and value < least):
        raise ValueError(f"{name}: expected {wanted}, got {value}")
    return float(value)


def check_count(name: str, count: Count) -> Count:
    """A count as a number, or a 0-d tensor that is left where it is."""
    if count is None:
        return None
    if isinstance(count, Tensor):
        plain_tensor(name, count)
        if count.dim() != 0 or count.is_complex():
            raise ValueError(f"{name}: expected a number or a real 0-d tensor, got a tensor of shape {tuple(count.shape)}, {count.dtype}")
        return count.detach()
    return check_number(name, count)


def known_options(options: Mapping[str, Any], names: Sequence[str], arguments: Sequence[str]) -> None:
    """TypeError for an option that does not exist, with the nearest option or other argument."""
    for name in options:
        if name not in names:
            known = [argument for argument in (*arguments, *names) if argument != "options"]
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"))


def check_backend(backend: Any) -> str:
    """A backend's name, "" for the best one. Whether it exists and serves the device is for `backends.get` to say."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected a name of available_backends() or None, got {type(backend).__name__}")
    return backend or ""


def _same_device(name: str, x: Tensor, logits: Tensor) -> None:
    if x.device != logits.device:
        raise ValueError(f"{name}: expected a tensor on {logits.device} as the first argument, got one on {x.device}")
