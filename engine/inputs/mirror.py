"""Named arrays on the host and the device, brought over by one copy a step."""

from __future__ import annotations

import numpy as np
import torch

from engine.inputs.readback import DEPTH

_ALIGN = 16  # bytes; what compiled code and vectorised kernels expect of a tensor's start
_TOKEN_ARRAYS = 3  # input ids, positions, slot mapping


class Mirror:
    """Named arrays in one host allocation, and the same on the device: one memory on a CPU, pinned
    memory and a single copy a step on a GPU (a copy costs the host 9 us there, however small). Of
    the pinned side there are two, since a step is laid out while the copy of the one before it may
    still wait for the GPU.

    In memory: token arrays, which end where the named ones begin and start the earlier the more
    tokens there are; named arrays; last of them the block tables, of which the first rows count. So
    what a step needs is always one range, and every array's place depends on the token count alone.

    Args:
        layout: name -> (shape, dtype) of the named arrays; the last has a row a sequence.
        max_tokens: room for token arrays.
    """

    def __init__(
        self,
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]],
        max_tokens: int,
        device: torch.device,
    ) -> None:
        # Not at 0 even when full: dynamo takes a storage offset of 0 or 1 for a constant, and a
        # step of exactly max_tokens tokens would compile the model again.
        self._named = size = _ALIGN + _TOKEN_ARRAYS * _stride(max_tokens) * 8
        offsets = {}
        for name, (shape, dtype) in layout.items():
            offsets[name] = size
            nbytes = int(np.prod(shape)) * dtype.itemsize
            size += -(-nbytes // _ALIGN) * _ALIGN
        self._tables, rows = offsets[name], shape[0]
        self._table_row_bytes = nbytes // rows
        on_gpu = device.type == "cuda"
        memories = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
            for _ in range(DEPTH if on_gpu else 1)
        ]
        self._device = torch.zeros_like(memories[0], device=device) if on_gpu else memories[0]

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {}
            for name, (shape, dtype) in layout.items():
                stop = offsets[name] + int(np.prod(shape)) * dtype.itemsize
                found[name] = memory[offsets[name] : stop].view(dtype).view(shape)
            return found

        self.tensors = views(self._device)
        self._hosts = [
            (memory, {name: view.numpy() for name, view in views(memory).items()})
            for memory in memories
        ]
        self._turn = 0

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The host's arrays by name, of the side whose turn it is."""
        return self._hosts[self._turn][1]

    def turn(self) -> None:
        """Goes to the other host side, that of DEPTH steps before. Rank 0 has collected that step,
        or the plan of this one would not be there; so its copies are done on every rank, since
        the step's collectives stand behind them."""
        self._turn = (self._turn + 1) % len(self._hosts)

    def token_arrays(self, tokens: int) -> tuple[np.ndarray, torch.Tensor]:
        """-> [3, stride] int64 on host and device, stride >= tokens; rows start aligned."""
        stride = _stride(tokens)
        begin = self._named - _TOKEN_ARRAYS * stride * 8
        host, device = (
            memory[begin : self._named].view(torch.int64).view(_TOKEN_ARRAYS, stride)
            for memory in (self._hosts[self._turn][0], self._device)
        )
        return host.numpy(), device

    def upload(self, tokens: int, rows: int) -> None:
        """Copies to the device what a step of `tokens` tokens and `rows` sequences needs."""
        host = self._hosts[self._turn][0]
        if self._device is not host:
            begin = self._named - _TOKEN_ARRAYS * _stride(tokens) * 8
            stop = self._tables + rows * self._table_row_bytes
            self._device[begin:stop].copy_(host[begin:stop], non_blocking=True)


def _stride(tokens: int) -> int:
    """int64 from one token array to the next, so that each starts aligned."""
    return -(-tokens * 8 // _ALIGN) * _ALIGN // 8
