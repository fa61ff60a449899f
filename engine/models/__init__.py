"""Model architectures: arithmetic only."""

from engine.models.qwen import Qwen3ForCausalLM

__all__ = ["Qwen3ForCausalLM"]
