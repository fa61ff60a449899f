"""A scheduler with its pool, stepped by hand."""

from __future__ import annotations

from engine.requests.request import Request
from engine.requests.sampling_params import SamplingParams
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Schedule, Scheduler

EOS = 1
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class Engine:
    """A scheduler with its pool; `step` computes a step whose every sampled token is `token`."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        prefix_cache: bool = True,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 4_096,
    ) -> None:
        self.pool = BlockPool(num_pages, page_size, prefix_cache)
        self.scheduler = Scheduler(
            pool=self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=[EOS],
        )
        self.clock = 0.0

    def add(self, name: str, prompt: list[int] | int, params: SamplingParams = LONG) -> Request:
        """Queues a prompt; a number stands for a prompt of that many tokens unlike all others."""
        if isinstance(prompt, int):
            prompt = [10_000 + sum(name.encode()), *range(100, 100 + prompt - 1)][:prompt]
        request = Request(name, prompt, params, seed=0, arrival_s=0.0)
        self.scheduler.add(request)
        return request

    def schedule(self) -> Schedule:
        schedule = self.scheduler.schedule()
        self.scheduler.check_invariants()
        return schedule

    def update(self, schedule: Schedule, token: int = 5) -> list[Request]:
        self.clock += 1.0
        sampled = [token for seq in schedule.seqs if seq.samples]
        finished = self.scheduler.update(schedule, sampled, self.clock)
        self.scheduler.check_invariants()
        return finished

    def step(self, token: int = 5) -> Schedule:
        schedule = self.schedule()
        self.update(schedule, token)
        return schedule

    def finish_all(self, steps: int = 5_000) -> list[Request]:
        finished: list[Request] = []
        for _ in range(steps):
            if not self.scheduler.has_work:
                return finished
            finished += self.update(self.schedule())
        raise AssertionError(f"work left after {steps} steps")


def table(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(s.request.request_id, s.start, s.query_len, s.samples) for s in schedule.seqs]
