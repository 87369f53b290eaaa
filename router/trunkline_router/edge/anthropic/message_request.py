"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, ClassVar

from pydantic import Field

from trunkline.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from trunkline_router.edge.anthropic.conversation import ConversationFields
from trunkline_router.edge.request_fields import MOST_UINT32, SEED_MASK, GenerationFields, Integers, Strings, Uint32


class MessageRequest(ConversationFields):
    """A conversation, and how to continue it."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_UINT32)] | None = None
    # As vLLM names them.
    seed: Annotated[int, Field(ge=-(1 << 63), le=SEED_MASK)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Integers | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    ignored: ClassVar[frozenset[str]] = ConversationFields.ignored | {"metadata", "service_tier"}

    def generate_request(self, request_id: str) -> GenerateRequest:
        """Returns the request. An answer may be as long as the context allows, whatever max_tokens says: clients ask
        for more than small models have. Raises RequestRefused (INVALID_REQUEST)."""
        fields = GenerationFields(
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
        )
        return GenerateRequest(
            model=self.model or "",
            chat=self.chat(),
            sampling=fields.sampling(self.max_tokens),
            fit_max_tokens=True,
            request_id=request_id,
            lane=fields.lane,
            cache_salt=self.cache_salt or "",
        )


class CountRequest(ConversationFields):
    """A conversation whose tokens are counted."""

    def tokenize_request(self) -> TokenizeRequest:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        return TokenizeRequest(model=self.model or "", chat=self.chat())
