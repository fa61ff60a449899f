"""A request: what was asked, how far it is, when things happened, what came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.requests.sampling_params import SamplingParams
from engine.requests.text import StopText


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop id or a stop string; see RequestOutput.stop_reason
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"
    ERROR = "error"  # the request could not be served; see RequestOutput.error


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of a prompt or an output beside the model's most probable ones at its place, by the
    model's own distribution: before penalties, biases, temperature and filters.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the most probable token; of equals the lower id comes first.
        top: (token id, logprob) of as many tokens as were asked for, in order of rank.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence inside the engine, one of the `n` of a prompt; the scheduler moves it.

    Invariant that block counts rest on: when a step is planned, `num_tokens` counts the token whose
    K/V it writes, be its id known or still in flight, and K/V is needed for positions
    0 .. num_tokens-1 at most (the last sampled token never gets any).

    Attributes:
        leader_id: the request whose prompt this one shares: this one waits until that prompt is
            computed, and then finds its full pages. None: the first of its prompt.
        streams: whether its caller wants to hear of every token.
        watched: its text so far, where stop strings need it; rank 0 alone has it.
        text: the text of a finished request that was watched, cut before its stop string.
        num_computed: positions whose K/V stands in the cache once all steps in flight have run
            (cached prefix included).
        steps_in_flight: planned steps that hold this request and are not booked yet;
            tokens_in_flight: how many of them sample.
        page_ids: pages of this request in order of position.
        pages_sent: how many of them the ranks' block tables already hold.
        slot: row of the block tables and of the last-token buffer while resident, else -1.
        token_on_device: whether its last token was, or will be by a step in flight, sampled in that
            slot, so that the ranks have it; False again after a preemption.
        logprobs, prompt_logprobs: one entry for each output token, and for each prompt token but
            the first so far as they are computed, if they were asked for; kept over a preemption.
        arrival_s, ...: `time.perf_counter()` seconds, comparable between processes of one host.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_s: float
    leader_id: str | None = None
    streams: bool = False
    watched: StopText | None = None
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    steps_in_flight: int = 0
    tokens_in_flight: int = 0
    page_ids: list[int] = field(default_factory=list)
    pages_sent: int = 0
    slot: int = -1
    token_on_device: bool = False
    preemptions: int = 0
    cached_tokens: int = 0
    first_scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_cacheable(self) -> int:
        """Leading positions that may come from the prefix cache: at least one must be computed to
        sample from, and so must all whose prompt log-probabilities are still wanted."""
        if self.params.prompt_logprobs is None:
            return self.num_tokens - 1
        known, wanted = len(self.prompt_logprobs), len(self.prompt_ids) - 1
        return self.num_tokens - 1 if known == wanted else known

    @property
    def num_tokens(self) -> int:
        """Of prompt and output, those in flight included."""
        return len(self.prompt_ids) + self.num_generated

    @property
    def num_generated(self) -> int:
        """Tokens of output, those in flight included."""
        return len(self.output_ids) + self.tokens_in_flight

    def token(self, position: int) -> int:
        """The token id at a position of prompt + output."""
        n = len(self.prompt_ids)
        return self.prompt_ids[position] if position < n else self.output_ids[position - n]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. With n > 1 it is the first of the prompt's outputs, and the others, each
    with tokens, times and reasons of its own, stand in `siblings`.

    Attributes (all times in seconds; None where the event did not happen):
        request_id: the caller's, or "#" and the request's ordinal; siblings have it too.
        sample: 0 .. n-1.
        token_ids: as generated, the token that ended it included.
        text: decoded output, cut before the stop string that ended it; None when the prompt was
            given as ids and no stop string asked for text.
        stop_reason: the stop token id or stop string that ended it; None after EOS or otherwise.
        queue_s: arrival to the first step that held the request.
        ttft_s: arrival to first token.
        tpot_s: (last token - first token) / (tokens - 1); None for one token.
        e2e_s: arrival to last token.
        token_times_s: when each token was handed out, `time.perf_counter()` seconds.
        cached_tokens: prompt tokens taken from the prefix cache at first admission; siblings find
            the pages of the first output there.
        logprobs: of each output token; None: not asked for.
        prompt_logprobs: of each prompt token, None for the first; None: not asked for, as of
            siblings, whose prompt is the first output's.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    error: str | None
    arrival_s: float
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    token_times_s: tuple[float, ...]
    preemptions: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stop_reason: int | str | None = None
    sample: int = 0
    siblings: tuple[RequestOutput, ...] = ()

    @property
    def samples(self) -> tuple[RequestOutput, ...]:
        """All n outputs of the prompt, in order."""
        return (self, *self.siblings)

    @classmethod
    def from_request(
        cls, request: Request, text: str | None, request_id: str, sample: int
    ) -> RequestOutput:
        """`request_id` and `sample`: as in the attributes; a Request has an id of its own."""
        assert request.finish_reason is not None
        times, arrival = request.token_times_s, request.arrival_s
        started, params = request.first_scheduled_s, request.params
        of_prompt = (None, *request.prompt_logprobs)[: len(request.prompt_ids)]
        return cls(
            request_id=request_id,
            prompt_token_ids=request.prompt_ids,
            token_ids=request.output_ids,
            text=text,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            arrival_s=arrival,
            queue_s=None if started is None else started - arrival,
            ttft_s=times[0] - arrival if times else None,
            tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            e2e_s=times[-1] - arrival if times else None,
            token_times_s=tuple(times),
            preemptions=request.preemptions,
            cached_tokens=request.cached_tokens,
            logprobs=None if params.logprobs is None else tuple(request.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else of_prompt,
            sample=sample,
        )
