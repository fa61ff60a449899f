"""Call: one request of a caller, from its prompt to the outputs of all its samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.requests.request import FinishReason, Request, RequestOutput
from engine.requests.text import Decode, StopText


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUpdate:
    """What has come of one sample of a request since its last update.

    Attributes:
        request_id: the caller's; index: of its prompt in the call; sample: 0 .. n-1.
        token_ids: new tokens; one an update, but the last may have none or several.
        text: what they add to the text, whole characters only, less what may be the beginning of a
            stop string; all texts of a sample together are its output's. None: as there.
        output: the finished sample, in its last update (without siblings: they end on their own).
    """

    request_id: str
    index: int
    sample: int
    token_ids: tuple[int, ...]
    text: str | None
    output: RequestOutput | None = None


class _Progress:
    """How much of a sample its caller has seen."""

    def __init__(self, text: StopText | None) -> None:
        self.tokens = 0
        self.characters = 0
        self.text = text


class Call:
    """The n samples of one prompt, each a Request of the engine.

    Args:
        request_id: the caller's; index: the prompt's place among those of its call.
        requests: by sample; their params are alike.
        decode: token ids to text; None: no text is wanted.

    Attributes:
        sent: whether the engine knows of it; the client's to set.
        finished: whether every sample has ended.
    """

    def __init__(
        self, request_id: str, index: int, requests: Sequence[Request], decode: Decode | None
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.requests = list(requests)
        self.sent = False
        self._decode = decode
        self._samples = {request.request_id: i for i, request in enumerate(requests)}
        self._unfinished = set(self._samples)
        stop = requests[0].params.stop
        self._progress = [_Progress(StopText(decode, stop) if decode else None) for _ in requests]

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def refuse(self, error: str) -> None:
        """Ends all samples before anything has come of them."""
        for request in self.requests:
            request.finish_reason, request.error = FinishReason.ERROR, error
            request.finished_s = time.perf_counter()
            self.end(request)

    def end(self, request: Request) -> None:
        """Books a sample that has ended; it takes the place of what was sent."""
        self.requests[self._samples[request.request_id]] = request
        self._unfinished.discard(request.request_id)

    def output(self) -> RequestOutput:
        """The first sample with the others as its siblings, once all have ended."""
        assert self.finished
        first, *others = (self._output(sample) for sample in range(len(self.requests)))
        return replace(first, siblings=tuple(others))

    def token(self, request_id: str, token_id: int) -> StreamUpdate:
        """What one token adds, while its sample goes on."""
        sample = self._samples[request_id]
        progress = self._progress[sample]
        progress.tokens += 1
        text = None
        if progress.text is not None:
            # A stop string that ends the sample would have ended it in the engine.
            text = progress.text.push(token_id, may_stop=False)
            progress.characters += len(text)
        return StreamUpdate(
            request_id=self.request_id,
            index=self.index,
            sample=sample,
            token_ids=(token_id,),
            text=text,
        )

    def last(self, request: Request) -> StreamUpdate:
        """What is left to say of a sample that has ended."""
        self.end(request)
        sample = self._samples[request.request_id]
        progress, output = self._progress[sample], self._output(sample)
        return StreamUpdate(
            request_id=self.request_id,
            index=self.index,
            sample=sample,
            token_ids=tuple(output.token_ids[progress.tokens :]),
            text=None if output.text is None else output.text[progress.characters :],
            output=output,
        )

    def _output(self, sample: int) -> RequestOutput:
        request = self.requests[sample]
        text = request.text
        if text is None and self._decode is not None and request.error is None:
            text = self._decode(request.output_ids)
        return RequestOutput.from_request(request, text, self.request_id, sample)
