"""One optimizer step on one row: the mathematics of ``jrec.row_optimizers`` in float32, for any table dtype."""

from __future__ import annotations

import math

import numpy as np

from jrec.native.accumulate import BF16, F32
from jrec.native.compile import inlined
from jrec.native.hyper import STEPS, Hyper
from jrec.native.memory import get_bf16, get_f16, get_f32, get_i32, put_bf16, put_f16, put_f32
from jrec.native.rounding import round_bf16, round_f16

(
    SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, RMSPROP, ADAM, ROWWISE_RMSPROP, ROWWISE_ADAM,
    EXACT_MOMENTUM, EXACT_RMSPROP, EXACT_ADAM, EXACT_ADAMW,
) = range(len(STEPS))  # fmt: skip


(
    LEARNING_RATE, SCALE, WEIGHT_DECAY, MAX_NORM, A, B, C, CORRECTION1, CORRECTION2, REST_A, REST_B,
    TAKEN, REST_ROW, LOG_A, LOG_B, LOG_ROW, STOCHASTIC, KEY0, KEY1, TAIL, TAIL_AFTER,
) = (int(word) for word in Hyper)  # fmt: skip
_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def _prepare(row, gradient, dim, hyper):
    """Unscales, clips and decays the gradient, in place."""
    # The order of ``RowOptimizer.prepare``: the norm is of the unscaled gradient, and decay is not clipped.
    scale, decay, limit = get_f32(hyper, SCALE), get_f32(hyper, WEIGHT_DECAY), get_f32(hyper, MAX_NORM)
    if scale != _ONE:
        for d in range(dim):
            put_f32(gradient, d, get_f32(gradient, d) * scale)
    if limit < np.float32(np.inf):
        norm = math.sqrt(_sum_of_squares(gradient, dim))
        # False of NaN, which then reaches the row and is noticed.
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
def _power(log, exponent):
    """A number in [0, 1], whose logarithm is given, to a power of at least 0."""
    # Minus infinity is the logarithm of 0, whose power of 0 would be no number.
    return _ONE if exponent == _ZERO else np.float32(math.exp(exponent * log))


@inlined
def _numbers(hyper, first):
    """The weights and nodes of ``ExactAdam.tail_numbers``."""
    return (
        get_f32(hyper, first), get_f32(hyper, first + 1), get_f32(hyper, first + 2), get_f32(hyper, first + 3),
        get_f32(hyper, first + 4), get_f32(hyper, first + 5), get_f32(hyper, first + 6), get_f32(hyper, first + 7),
        get_f32(hyper, first + 8), get_f32(hyper, first + 9), get_f32(hyper, first + 10), get_f32(hyper, first + 11),
        get_f32(hyper, first + 12), get_f32(hyper, first + 13), get_f32(hyper, first + 14), get_f32(hyper, first + 15),
    )  # fmt: skip


@inlined
def _tail(root, n):
    """``ExactAdam``'s tail of a unit of ``mu``, of a root of ``nu``; in pairs, so that divisions run side by side."""
    total = n[0] / (root + n[8]) + n[1] / (root + n[9])
    total = total + n[2] / (root + n[10]) + n[3] / (root + n[11])
    total = total + n[4] / (root + n[12]) + n[5] / (root + n[13])
    return total + n[6] / (root + n[14]) + n[7] / (root + n[15])


@inlined
def _exact_adam(row, gradient, dim, slot0, slot1, slot2, hyper):
    rate, a, b = get_f32(hyper, LEARNING_RATE), get_f32(hyper, A), get_f32(hyper, B)
    rest_a, rest_b, rest_row = get_f32(hyper, REST_A), get_f32(hyper, REST_B), get_f32(hyper, REST_ROW)
    eps, correction1, correction2 = get_f32(hyper, C), get_f32(hyper, CORRECTION1), get_f32(hyper, CORRECTION2)
    taken = get_f32(hyper, TAKEN)
    missed = taken - get_f32(slot2, 0)
    # The row is brought up to date below for every step that it missed, and takes this one.
    put_f32(slot2, 0, taken + _ONE)
    of_mu, of_nu = _power(get_f32(hyper, LOG_A), missed), _power(get_f32(hyper, LOG_B), missed)
    of_row = _power(get_f32(hyper, LOG_ROW), missed)
    # Read once a row: the loop over its elements keeps them in registers where there are enough.
    before, after = _numbers(hyper, TAIL), _numbers(hyper, TAIL_AFTER)
    for d in range(dim):
        g, mu, nu = get_f32(gradient, d), of_mu * get_f32(slot0, d), of_nu * get_f32(slot1, d)
        # Where the row is now, from where it would come to rest: see ``jrec.row_optimizers.Exact``, ``current``.
        value = of_row * get_f32(row, d) + mu * _tail(math.sqrt(nu), before)
        value = value - rest_row * value
        mu = rest_a * g + a * mu
        nu = rest_b * (g * g) + b * nu
        put_f32(slot0, d, mu)
        put_f32(slot1, d, nu)
        value = value - rate * ((mu / correction1) / (math.sqrt(nu / correction2) + eps))
        # Stored is again where the row comes to rest if no gradient follows.
        put_f32(row, d, value - mu * _tail(math.sqrt(nu), after))


@inlined
def _step(kind, row, gradient, dim, slot0, slot1, slot2, hyper):
    rate, a, b = get_f32(hyper, LEARNING_RATE), get_f32(hyper, A), get_f32(hyper, B)
    rest_a, rest_b = get_f32(hyper, REST_A), get_f32(hyper, REST_B)
    # The same kind for all rows of a call, so that these branches are predicted.
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
    elif kind == EXACT_MOMENTUM:
        taken = get_f32(hyper, TAKEN)
        decay = _power(get_f32(hyper, LOG_A), taken - get_f32(slot1, 0))
        put_f32(slot1, 0, taken + _ONE)
        before, after = get_f32(hyper, TAIL), get_f32(hyper, TAIL_AFTER)
        for d in range(dim):
            g, trace = get_f32(gradient, d), decay * get_f32(slot0, d)
            value = get_f32(row, d) + before * trace
            trace = g + a * trace
            put_f32(slot0, d, trace)
            value = value - rate * (g + a * trace if b != _ZERO else trace)
            put_f32(row, d, value - after * trace)
    elif kind == EXACT_RMSPROP:
        taken = get_f32(hyper, TAKEN)
        decay = a * _power(get_f32(hyper, LOG_A), taken - get_f32(slot1, 0))
        put_f32(slot1, 0, taken + _ONE)
        for d in range(dim):
            g = get_f32(gradient, d)
            nu = rest_a * (g * g) + decay * get_f32(slot0, d)
            put_f32(slot0, d, nu)
            put_f32(row, d, get_f32(row, d) - rate * g / math.sqrt(nu + b))
    elif (kind == EXACT_ADAM) | (kind == EXACT_ADAMW):
        _exact_adam(row, gradient, dim, slot0, slot1, slot2, hyper)
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
def update_row(kind, table, dtype, row, number, dim, stride, gradient, slot0, slot1, slot2, hyper, scratch):
    """Steps ``dim`` elements of row number ``row`` of the table, whose rows begin every ``stride`` elements.

    Stochastic rounding hashes ``number``. ``gradient`` is overwritten, ``scratch`` holds ``dim`` float32.
    """
    at = row * stride
    # A slot of one number a row is dense; one of elements has the stride of the table, padding among it.
    slot0 += 4 * (row if kind in (ROWWISE_ADAGRAD, ROWWISE_RMSPROP) else at)
    slot1 += 4 * (row if kind in (ROWWISE_ADAM, EXACT_MOMENTUM, EXACT_RMSPROP) else at)
    # Only exact Adam has a third slot; of the others nobody reads this address.
    slot2 += 4 * row
    if dtype == F32:
        values = table + 4 * at
        _prepare(values, gradient, dim, hyper)
        _step(kind, values, gradient, dim, slot0, slot1, slot2, hyper)
        return
    # A float32 row was stepped where it lies; 16 bits are widened to a row of scratch, which the step changes.
    stored = table + 2 * at
    for d in range(dim):
        put_f32(scratch, d, get_bf16(stored, d) if dtype == BF16 else get_f16(stored, d))
    _prepare(scratch, gradient, dim, hyper)
    _step(kind, scratch, gradient, dim, slot0, slot1, slot2, hyper)
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
