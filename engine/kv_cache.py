"""The paged K/V cache of one rank."""

from __future__ import annotations

import torch

from engine.shape import ModelShape


class KVCache:
    """K and V of one rank's heads, in pages that block tables name.

    Attributes:
        num_pages: pages that the block pool hands out, numbered from 0.
        page_size: tokens of one page.
        dummy_page: one page more, which no block table names: padding rows write there.
        dummy_slot: the first slot of that page.
        layers: (K, V) of each layer, both [num_pages + 1, page_size, kv_heads_local, head_dim], and
            each a storage of its own: where the two are views on one, torch.compile copies a whole
            V cache before and after each operator that writes to it.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dummy_page = num_pages
        self.dummy_slot = num_pages * page_size
        size = (num_pages + 1, page_size, shape.kv_heads_local(tp), shape.head_dim)

        # Zeros, not empty: a kernel that multiplies what stands past the end of a sequence by a
        # masked weight of 0 would make NaN of an uninitialised NaN.
        def zeros() -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.layers = [(zeros(), zeros()) for _ in range(shape.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    @staticmethod
    def bytes_per_page(shape: ModelShape, tp: int, page_size: int, itemsize: int) -> int:
        """Bytes of one page on one rank, K and V of all layers; a cache of n pages holds n + 1."""
        return page_size * shape.kv_bytes_per_token(tp, itemsize)
