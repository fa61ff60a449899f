"""The sampler as two Triton kernels; the reference is engine/sampling/sampler.py.

In plain tensor operations the Philox rounds move some 100 int64 arrays of [N, V/4] through memory:
milliseconds at N = 256, V = 151,936. Here each logit is read twice and nothing else is.
"""

from __future__ import annotations

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2

_BLOCK = 2048  # logits of one program; 75 programs a row at V = 151,936


@kernel()
def _block_max(logits_ptr, value_ptr, index_ptr, stride, vocab, blocks, BLOCK: tl.constexpr):
    """Largest logit of one block of one row, and its first index."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf"))
    value, index = tl.max(
        logit.to(tl.float32), axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    tl.store(value_ptr + row * blocks + block, value)
    # Rows of NaN (padding may hold them) must not name a token past the vocabulary either.
    tl.store(index_ptr + row * blocks + block, tl.minimum(block * BLOCK + index, vocab - 1))


@kernel()
def _block_race(
    logits_ptr,
    maxima_ptr,
    value_ptr,
    index_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    stride,
    vocab,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Winner of the exponential race among one block of one row; greedy rows keep their maxima."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        each = tl.arange(0, BLOCKS)
        maxima = tl.load(maxima_ptr + row * blocks + each, mask=each < blocks, other=float("-inf"))
        highest = tl.max(maxima, axis=0)
        token = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf"))
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        counter = (token // 4).to(tl.uint32)
        zero = counter * 0
        low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
        high = zero + (position >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, counter, low, high, zero)
        lane = token % 4
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
        uniform = (word.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
        uniform = tl.minimum(uniform, 0.99999994)  # the largest float32 below 1
        # -log1p(-u), kept exact for small u, where log(1 - u) would lose what decides the race: the
        # series' first three terms are within 2^-26 of it below 2^-7.
        series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
        exponential = tl.where(uniform < 0.0078125, series, -tl.log(1.0 - uniform))
        divisor = tl.maximum(temperature, 1.1754943508222875e-38)
        score = (logit.to(tl.float32) - highest) / divisor - tl.log(exponential)
        score = tl.where(token < vocab, score, float("-inf"))
        value, index = tl.max(
            score, axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        tl.store(value_ptr + row * blocks + block, value)
        tl.store(index_ptr + row * blocks + block, tl.minimum(block * BLOCK + index, vocab - 1))


def sample_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Arguments and result as of Sampler.__call__; logits' rows contiguous, V below 2^31."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    blocks = cdiv(vocab, _BLOCK)
    maxima = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    values = torch.empty_like(maxima)
    indices = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    grid = (rows, blocks)
    _block_max[grid](logits, maxima, indices, logits.stride(0), vocab, blocks, BLOCK=_BLOCK)
    values.copy_(maxima)
    _block_race[grid](
        logits,
        maxima,
        values,
        indices,
        temperatures,
        seeds,
        positions,
        logits.stride(0),
        vocab,
        blocks,
        BLOCK=_BLOCK,
        BLOCKS=next_power_of_2(blocks),
    )
    best = values.argmax(dim=1, keepdim=True)
    return indices.gather(1, best).squeeze(1)
