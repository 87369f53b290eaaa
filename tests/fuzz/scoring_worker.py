"""A worker without a model that answers everything at once, log-probabilities among it."""

from typing import Any

from tests.router.fake_worker import FakeChoice, FakeWorker
from tests.router.tokenizer_files import BYTES, VOCAB_SIZE
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import OutputKind, SequenceOutput, SessionResponse, Submit

ANSWER = 3  # tokens of a choice
FIRST = VOCAB_SIZE - len(BYTES)  # tokens below are special
LOGPROB = -0.5


def scored(token_id: int, num_top: int) -> TokenLogprobs:
    top = [TokenLogprob(token_id=FIRST + rank, logprob=LOGPROB, rank=rank + 1) for rank in range(num_top)]
    return TokenLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=LOGPROB, rank=1), top=top)


class ScoringWorker(FakeWorker):
    """Each choice has ANSWER tokens, or as many as its request allows. Keeps nothing of what it has answered."""

    def _take(self, submit: Submit, outbox: Any) -> FakeChoice:
        sampling = submit.sampling
        count = min(ANSWER, sampling.max_tokens) if sampling.HasField("max_tokens") else ANSWER
        count = max(1, count)
        chunk = OutputChunk(
            index=submit.choice,
            first_token_index=len(submit.resume.output_token_ids),
            token_ids=range(FIRST, FIRST + count),
            text="x" * count,
            text_offset=submit.resume.text_bytes_sent,
            finish_reason=FinishReason.FINISH_REASON_LENGTH,
        )
        if sampling.HasField("logprobs"):
            chunk.logprobs.extend(scored(FIRST + number, sampling.logprobs) for number in range(count))
        prompt = PromptReport(prompt_tokens=len(submit.prompt_token_ids))
        if sampling.HasField("prompt_logprobs"):
            prompt.logprobs.extend(scored(token_id, sampling.prompt_logprobs) for token_id in submit.prompt_token_ids)
        output = SequenceOutput(handle=submit.handle, chunk=chunk, prompt=prompt)
        if submit.work.output == OutputKind.OUTPUT_KIND_VECTOR:
            output.vector.values = bytes(4 * 3)
        elif submit.work.output == OutputKind.OUTPUT_KIND_SCORE:
            output.score.values.append(0.5)
        outbox.put_nowait(SessionResponse(outputs=[output]))
        self.messages.clear()
        return FakeChoice(self, outbox, submit, 0)
