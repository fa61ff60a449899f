"""The operators of own products in compiled code, at numbers of rows that cuBLAS would take."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import Kernels
from engine.kernels.linear import MAX_ROWS, linear


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def test_one_graph_serves_any_number_of_rows() -> None:
    """No break, and no second graph when the number changes."""
    kernels, graphs = Kernels(linear="triton"), []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        )
        return graph.forward

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, bias, kernels) * 2

    torch.manual_seed(0)
    weight, bias = torch.randn(24, 16), torch.randn(24)
    compiled = torch.compile(product, fullgraph=True, backend=backend)
    for rows in (MAX_ROWS + 1, 100, 300):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        exact = 2 * (x.double() @ weight.double().T + bias.double())
        torch.testing.assert_close(
            compiled(x, weight, bias), exact, rtol=1e-5, atol=1e-5, check_dtype=False
        )
    assert graphs == [["rangefinder.linear", "<built-in function mul>"]]
