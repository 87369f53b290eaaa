"""The whole answer to one prompt, for the protocols to write: what the responses of the shared path add up to."""

from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo, Usage


class CollectedAnswer:
    """Choices after the first one are made when they arrive: a body may ask for any number before it is checked."""

    def __init__(self) -> None:
        self.prompt = PromptInfo()
        self.usage = Usage()
        self._choices = [OutputChunk()]  # without their texts
        self._texts: list[list[str]] = [[]]

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response."""
        for chunk in response.chunks:
            while chunk.index >= len(self._choices):  # the shared path has checked that the choice was asked for
                self._choices.append(OutputChunk())
                self._texts.append([])
            self._choices[chunk.index].MergeFrom(chunk)
            self._texts[chunk.index].append(chunk.text)
        if response.HasField("prompt"):
            self.prompt = response.prompt
        if response.HasField("usage"):
            self.usage = response.usage

    @property
    def choices(self) -> list[OutputChunk]:
        """Each choice so far as one chunk."""
        for choice, texts in zip(self._choices, self._texts, strict=True):
            choice.text = "".join(texts)
        return self._choices
