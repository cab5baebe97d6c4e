"""One optimizer step on one row: the mathematics of ``jrec.row_optimizers`` in float32, for any table dtype."""

from __future__ import annotations

import math

import numpy as np

from jrec.native.accumulate import BF16, F32
from jrec.native.compile import inlined
from jrec.native.hyper import STEPS, Hyper
from jrec.native.memory import get_bf16, get_f16, get_f32, get_i32, put_bf16, put_f16, put_f32
from jrec.native.rounding import round_bf16, round_f16

SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, RMSPROP, ADAM, ROWWISE_RMSPROP, ROWWISE_ADAM = range(len(STEPS))


(
    LEARNING_RATE, SCALE, WEIGHT_DECAY, MAX_NORM, A, B, C, CORRECTION1, CORRECTION2, REST_A, REST_B,
    STOCHASTIC, KEY0, KEY1,
) = (int(word) for word in Hyper)  # fmt: skip
_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def _prepare(row, gradient, dim, hyper):
    """Unscales, clips and decays the gradient, in place."""
    scale, decay, limit = get_f32(hyper, SCALE), get_f32(hyper, WEIGHT_DECAY), get_f32(hyper, MAX_NORM)
    if scale != _ONE:
        for d in range(dim):
            put_f32(gradient, d, get_f32(gradient, d) * scale)
    if limit < np.float32(np.inf):
        norm = math.sqrt(_sum_of_squares(gradient, dim))
        if norm > limit:
            factor = limit / norm
            for d in range(dim):
                put_f32(gradient, d, get_f32(gradient, d) * factor)
    if decay != _ZERO:
        for d in range(dim):
            put_f32(gradient, d, get_f32(gradient, d) + decay * get_f32(row, d))


@inlined
def _sum_of_squares(values, dim):
    total = _ZERO
    for d in range(dim):
        value = get_f32(values, d)
        total += value * value
    return total


@inlined
def _inverse_root(total, eps):
    # As optax has it: where all gradients were zero the row stays, rather than move by 0 / 0.
    return _ONE / math.sqrt(total + eps) if total > _ZERO else _ZERO


@inlined
def _step(kind, row, gradient, dim, slot0, slot1, hyper):
    rate, a, b = get_f32(hyper, LEARNING_RATE), get_f32(hyper, A), get_f32(hyper, B)
    rest_a, rest_b = get_f32(hyper, REST_A), get_f32(hyper, REST_B)
    if kind == SGD:
        for d in range(dim):
            put_f32(row, d, get_f32(row, d) - rate * get_f32(gradient, d))
    elif kind == MOMENTUM:
        for d in range(dim):
            g = get_f32(gradient, d)
            trace = g + a * get_f32(slot0, d)
            put_f32(slot0, d, trace)
            update = g + a * trace if b != _ZERO else trace
            put_f32(row, d, get_f32(row, d) - rate * update)
    elif kind == ADAGRAD:
        for d in range(dim):
            g = get_f32(gradient, d)
            total = get_f32(slot0, d) + g * g
            put_f32(slot0, d, total)
            put_f32(row, d, get_f32(row, d) - rate * g * _inverse_root(total, a))
    elif kind == ROWWISE_ADAGRAD:
        total = get_f32(slot0, 0) + _sum_of_squares(gradient, dim) / np.float32(dim)
        put_f32(slot0, 0, total)
        scale = rate * _inverse_root(total, a)
        for d in range(dim):
            put_f32(row, d, get_f32(row, d) - scale * get_f32(gradient, d))
    elif kind == RMSPROP:
        for d in range(dim):
            g = get_f32(gradient, d)
            nu = rest_a * (g * g) + a * get_f32(slot0, d)
            put_f32(slot0, d, nu)
            put_f32(row, d, get_f32(row, d) - rate * g / math.sqrt(nu + b))
    elif kind == ROWWISE_RMSPROP:
        nu = rest_a * (_sum_of_squares(gradient, dim) / np.float32(dim)) + a * get_f32(slot0, 0)
        put_f32(slot0, 0, nu)
        scale = rate / math.sqrt(nu + b)
        for d in range(dim):
            put_f32(row, d, get_f32(row, d) - scale * get_f32(gradient, d))
    elif kind == ROWWISE_ADAM:
        nu = rest_b * (_sum_of_squares(gradient, dim) / np.float32(dim)) + b * get_f32(slot1, 0)
        put_f32(slot1, 0, nu)
        deviation = math.sqrt(nu / get_f32(hyper, CORRECTION2)) + get_f32(hyper, C)
        correction1 = get_f32(hyper, CORRECTION1)
        for d in range(dim):
            mu = rest_a * get_f32(gradient, d) + a * get_f32(slot0, d)
            put_f32(slot0, d, mu)
            put_f32(row, d, get_f32(row, d) - rate * ((mu / correction1) / deviation))
    else:
        eps, correction1, correction2 = get_f32(hyper, C), get_f32(hyper, CORRECTION1), get_f32(hyper, CORRECTION2)
        for d in range(dim):
            g = get_f32(gradient, d)
            mu = rest_a * g + a * get_f32(slot0, d)
            nu = rest_b * (g * g) + b * get_f32(slot1, d)
            put_f32(slot0, d, mu)
            put_f32(slot1, d, nu)
            update = (mu / correction1) / (math.sqrt(nu / correction2) + eps)
            put_f32(row, d, get_f32(row, d) - rate * update)


@inlined
def update_row(kind, table, dtype, row, number, dim, stride, gradient, slot0, slot1, hyper, scratch):
    """Steps ``dim`` elements of row number ``row`` of the table, whose rows begin every ``stride`` elements.

    Stochastic rounding hashes ``number``. ``gradient`` is overwritten, ``scratch`` holds ``dim`` float32.
    """
    at = row * stride
    slot0 += 4 * (row if kind in (ROWWISE_ADAGRAD, ROWWISE_RMSPROP) else at)
    slot1 += 4 * (row if kind == ROWWISE_ADAM else at)
    if dtype == F32:
        values = table + 4 * at
        _prepare(values, gradient, dim, hyper)
        _step(kind, values, gradient, dim, slot0, slot1, hyper)
        return
    stored = table + 2 * at
    for d in range(dim):
        put_f32(scratch, d, get_bf16(stored, d) if dtype == BF16 else get_f16(stored, d))
    _prepare(scratch, gradient, dim, hyper)
    _step(kind, scratch, gradient, dim, slot0, slot1, hyper)
    # The step runs in float32 whatever the table holds; only the way back to 16 bits rounds.
    if get_i32(hyper, STOCHASTIC) != 0:
        _round(dtype, scratch, number, dim, get_i32(hyper, KEY0), get_i32(hyper, KEY1))
    for d in range(dim):
        if dtype == BF16:
            put_bf16(stored, d, get_f32(scratch, d))
        else:
            put_f16(stored, d, get_f32(scratch, d))


@inlined
def _round(dtype, values, number, dim, key0, key1):
    """Moves values to the 16-bit grid at random, in place; storing them then changes nothing."""
    if dtype == BF16:
        for d in range(dim):
            put_f32(values, d, round_bf16(get_f32(values, d), key0, key1, number, d))
    else:
        for d in range(dim):
            put_f32(values, d, round_f16(get_f32(values, d), key0, key1, number, d))
