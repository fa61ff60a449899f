"""transformers behind the protocol: its own generate(), in static batches, with a streamer."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.backends.peer import NO_SEAM, PHASES, Peer, check, output, peak_resident_bytes
from harness.machine.models import resolve_model
from harness.observers.records import DECODE, PREFILL

if TYPE_CHECKING:
    import torch

    from engine.requests.request import RequestOutput
    from engine.requests.sampling_params import SamplingParams


class Stamps:
    """A streamer of generate() that keeps when each step's tokens came to the host. generate()
    waits for the device once a step anyway, to know whether it is done."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompts first, before any forward; then the tokens of each step."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...


class TransformersBackend(Peer):
    """AutoModelForCausalLM.generate() with its default (dynamic) cache, launched from Python.

    Requests are cut into batches of max_num_seqs in their order, one after the other. A batch's
    prompts are padded on the left to the longest, and it runs until its longest output is there:
    that is what its users do, and its cost. What a request has beyond its own length is dropped,
    and counts nowhere.
    """

    name = "transformers"
    lacks: Mapping[str, str] = MappingProxyType(NO_SEAM)

    def start(
        self, cfg: dict[str, Any], cache_dir: str | Path | None, since_s: float | None = None
    ) -> None:
        """`cache_dir` is not used: nothing is compiled."""
        begin = time.perf_counter() if since_s is None else since_s
        import torch
        import transformers

        from engine.shape import ModelShape
        from harness.machine.hardware import cpu_cores

        if self.effective:
            raise RuntimeError("the backend was started already; close it first")
        folder = Path(resolve_model(cfg["model"]))
        self._shape = shape = ModelShape.from_hf(folder)
        settings, self._device = cfg["engine"], cfg["device"]
        if self._device == "cpu":
            torch.set_num_threads(settings["threads_per_rank"] or cpu_cores())
        torch.manual_seed(settings["seed"])
        loading = time.perf_counter()
        dtype = shape.dtype if cfg["dtype"] == "auto" else cfg["dtype"]
        options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        if cfg["attention"] != "auto":
            options["attn_implementation"] = cfg["attention"]
        load_format = cfg["model"]["load_format"]
        if load_format == "dummy":
            config = transformers.AutoConfig.from_pretrained(folder)
            with torch.device(self._device):
                model = transformers.AutoModelForCausalLM.from_config(config, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        self._model: Any = model.to(self._device).eval()
        # In the place of the checkpoint's own, which may ask for sampling, penalties or an end.
        self._model.generation_config = transformers.GenerationConfig()
        if self._device == "cuda":
            torch.cuda.synchronize()
        loaded = time.perf_counter()
        self.startup = dict.fromkeys(PHASES, None) | {
            "load_s": loaded - loading,
            "spawn_s": loading - begin,
            "total_s": loaded - begin,
        }
        self.effective = {
            "tp": 1,
            "enforce_eager": True,
            "compile": "off",
            "attention": model.config._attn_implementation,
            "comm": None,
            "page_size": None,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "load_format": load_format,
            "mode": "eager",
            "max_model_len": settings["max_model_len"] or shape.longest_by_default,
            "max_num_seqs": settings["max_num_seqs"],
            "num_pages": None,
            "threads_per_rank": torch.get_num_threads(),
            "seed": torch.initial_seed(),
            "prefix_cache": False,
            "overlap": False,
            "cache": "dynamic",
            "version": transformers.__version__,
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        arrivals_s: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Raises ValueError: arrivals over time, or what `generate` would leave out."""
        if arrivals_s is not None:
            raise ValueError("backend=transformers: requests come all at once")
        check(self.name, params)
        arrival_s = time.perf_counter()
        size = self.effective["max_num_seqs"]
        outputs: list[RequestOutput] = []
        for first in range(0, len(prompts), size):
            batch = slice(first, first + size)
            outputs += self._batch(prompts[batch], params[batch], first, arrival_s)
        return outputs

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        first: int,
        arrival_s: float,
    ) -> Iterator[RequestOutput]:
        """Serves one static batch and logs its steps."""
        begin_s = time.perf_counter()
        lengths = [own.max_tokens for own in params]
        ids, mask = padded(prompts, self._device)  # [B, P] each
        stamps = Stamps()
        made = self._model.generate(
            ids,
            attention_mask=mask,
            generation_config=generation(params),
            streamer=stamps,
        )
        tokens = made[:, ids.shape[1] :].cpu().tolist()  # [B, N]
        times = stamps.times_s[1:]
        assert len(times) == max(lengths) == len(tokens[0]), (len(times), lengths, len(tokens[0]))
        before = begin_s
        for step, at in enumerate(times):
            live = sum(length > step for length in lengths)
            prompt = step == 0
            self.log_step(
                phase=PREFILL if prompt else DECODE,
                batch=live,
                tokens=sum(map(len, prompts)) if prompt else live,
                bucket=ids.numel() if prompt else len(prompts),
                samples=live,
                begin_s=before,
                end_s=at,
            )
            before = at
        del made, ids, mask
        return (
            output(
                first + place, prompts[place], tokens[place][:n],
                arrival_s=arrival_s, begin_s=begin_s, times_s=times[:n],
            )
            for place, n in enumerate(lengths)
        )  # fmt: skip

    def counters(self) -> dict[str, int]:
        """It has neither preemption nor a prefix cache."""
        return {"preemptions": 0, "cached_tokens": 0}

    def memory(self) -> list[dict[str, int | None]]:
        """The K/V cache comes and goes with each batch, inside of the peak."""
        import torch

        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        on_gpu = self._device == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_resident_bytes()
        return [{"weights_bytes": weights, "kv_bytes": None, "peak_bytes": peak}]

    def close(self) -> None:
        if self.effective:
            self.effective = {}
            del self._model
            gc.collect()


def padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (token ids, attention mask), [B, longest] each, padding on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def generation(params: Sequence[SamplingParams]) -> Any:
    """What generate() is told of a batch: no end but the length, and no filter of its own (its
    default for top_k was 50 for years).

    Raises:
        ValueError: requests of more than one temperature.
    """
    from transformers import GenerationConfig

    temperatures = {own.temperature for own in params}
    if len(temperatures) > 1:
        raise ValueError(
            f"backend=transformers: temperatures {sorted(temperatures)} in one batch; give one"
        )
    (temperature,) = temperatures
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    return GenerationConfig(
        do_sample=bool(temperature),
        max_new_tokens=max(own.max_tokens for own in params),
        eos_token_id=None,
        pad_token_id=0,
        **sampling,
    )
