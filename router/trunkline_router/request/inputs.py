"""The inputs of a request for vectors or scores: texts become prompts as the model's files say, and prompts tokens."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trunkline.status import RequestRefused, invalid
from trunkline.v1.worker_pb2 import GetModelResponse, PoolingModel
from trunkline.validation import check_length, max_total_tokens
from trunkline_router.prompts.token_ids import read_ids
from trunkline_router.prompts.tokenizer import EncodedInput, InputText, PromptTokenizer

MAX_INPUTS = 2048  # of a request: OpenAI's limit
# Of all texts of a request, as they are encoded: shared ones count for each input. They take some ten seconds of CPU.
MAX_CHARACTERS = 16 << 20
_PARTS = re.compile(r"{(instruction|query|document)}")

GivenInput = str | Sequence[int]  # a text or token ids


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a request for vectors or scores has in place of a prompt.

    queries: one for all inputs, or one for each, which are documents then; none: the inputs are prompts
    instruction: what makes a document relevant; "": the model's default
    prompt_name, prompt: names a prompt of the model that is put before texts, or takes its place
    truncate_to: tokens to which inputs are cut; 0: what the model takes; None: they are not cut
    """

    given: Sequence[GivenInput]
    queries: Sequence[str] = ()
    instruction: str = ""
    prompt_name: str = ""
    prompt: str | None = None
    truncate_to: int | None = None

    def check(self) -> None:
        """Raises RequestRefused (INVALID_REQUEST) for what is wrong whatever the model is."""
        if not 1 <= (count := len(self.given)) <= MAX_INPUTS:
            raise invalid("inputs", f"{count} inputs are not 1 to {MAX_INPUTS}")
        if empty := [index for index, one in enumerate(self.given) if not one]:
            raise invalid(f"inputs[{empty[0]}]", "is empty")
        if len(self.queries) not in (0, 1, count):
            raise invalid("queries", f"{len(self.queries)} queries are neither one nor as many as the {count} inputs")
        if not all(self.queries):
            raise invalid("queries", "a query is empty")
        if self.instruction and not self.queries:
            raise invalid("instruction", "is for queries and documents")
        ids = [index for index, one in enumerate(self.given) if not isinstance(one, str)] if self.queries else []
        if ids:
            raise invalid(f"inputs[{ids[0]}]", "a document must be a text")


async def encode_inputs(
    inputs: Inputs, tokenizer: PromptTokenizer, limits: GetModelResponse, tenant: str
) -> list[EncodedInput]:
    """Returns the tokens of checked inputs, in order. Raises RequestRefused."""
    model, cut_to = limits.pooling, _cut_to(inputs, max_total_tokens(limits))
    texts = {index: text for index, text in enumerate(_texts(inputs, model)) if text is not None}
    for index, text in texts.items():
        with _naming(index):
            for part in (f"{text.head}{text.text}{text.tail}", text.pair or ""):
                tokenizer.check_fits(part, max_total_tokens(limits) if cut_to is None else None)
    encoded = await tokenizer.encode_inputs(
        list(texts.values()),
        special_tokens=not (inputs.queries and model.pair_template),
        most_tokens=cut_to,
        tenant=tenant,
    )
    found = dict(zip(texts, encoded, strict=True))
    for index, given in enumerate(inputs.given):
        num_given = len(given)
        num_tokens = len(found[index].ids) if index in found else min(num_given, cut_to or num_given)
        with _naming(index):
            check_length(num_tokens, 0, context_length=limits.context_length, capacity=limits.kv_token_capacity)
        if not num_tokens:
            raise invalid(f"inputs[{index}]", "has no tokens")
        if not isinstance(given, str):
            ids = await read_ids(given[:num_tokens], vocab_size=limits.vocab_size, field=f"inputs[{index}]")
            found[index] = EncodedInput(ids, num_cut=num_given - num_tokens)
    return [found[index] for index in range(len(inputs.given))]


def _cut_to(inputs: Inputs, most_tokens: int) -> int | None:
    """Returns to how many tokens the inputs are cut. Raises RequestRefused (INVALID_REQUEST)."""
    if inputs.truncate_to is None:
        return None
    if inputs.truncate_to > most_tokens:
        raise invalid("truncate_prompt_tokens", f"{inputs.truncate_to} is more than the model's {most_tokens} tokens")
    return inputs.truncate_to or most_tokens


def _texts(inputs: Inputs, model: PoolingModel) -> list[InputText | None]:
    """Returns what is encoded of each input; None for token ids. Raises RequestRefused (INVALID_REQUEST)."""
    if not inputs.queries:
        prompt = _prompt(inputs, model)
        num_texts = sum(isinstance(one, str) for one in inputs.given)
        _check_total(num_texts * len(prompt) + _total(one for one in inputs.given if isinstance(one, str)))
        return [InputText(one, head=prompt) if isinstance(one, str) else None for one in inputs.given]
    if model.takes_no_pairs:
        raise invalid("queries", "this model has no template for a query and a document")
    queries = inputs.queries if len(inputs.queries) > 1 else list(inputs.queries) * len(inputs.given)
    documents = [one for one in inputs.given if isinstance(one, str)]
    template = model.pair_template
    if inputs.instruction and "{instruction}" not in template:
        raise invalid("instruction", "the prompts of this model have no place for one")
    if not template:
        _check_total(_total(queries) + _total(documents))
        return [InputText(query, document) for query, document in zip(queries, documents, strict=True)]
    before, _, after = template.partition("{document}")
    instruction = inputs.instruction or model.default_instruction
    times = Counter(_PARTS.findall(template))
    shared = len(template) + times["instruction"] * len(instruction)
    _check_total(len(documents) * shared + times["query"] * _total(queries) + times["document"] * _total(documents))

    def filled(text: str, query: str, document: str) -> str:
        parts = {"instruction": instruction, "query": query, "document": document}
        return _PARTS.sub(lambda found: parts[found[1]], text)

    heads = {query: filled(before, query, "") for query in inputs.queries}
    return [
        InputText(document, head=heads[query], tail=filled(after, query, document))
        for query, document in zip(queries, documents, strict=True)
    ]


def _total(texts: Iterable[str]) -> int:
    return sum(map(len, texts))


def _check_total(num_characters: int) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if the texts are too much together. They are not put together yet."""
    if num_characters > MAX_CHARACTERS:
        problem = f"make {num_characters} characters with the prompts and queries of each, more than {MAX_CHARACTERS}"
        raise invalid("inputs", problem)


def _prompt(inputs: Inputs, model: PoolingModel) -> str:
    """Returns the text that is put before each text. Raises RequestRefused (INVALID_REQUEST)."""
    if inputs.prompt is not None:
        if inputs.prompt_name:
            raise invalid("prompt_name", "a prompt is given beside it")
        return inputs.prompt
    name = inputs.prompt_name or model.default_prompt
    if not name:
        return ""
    if name not in model.prompts:
        known = ", ".join(sorted(model.prompts)) or "none"
        raise invalid("prompt_name", f"is not among the model's prompts: {known}")
    return model.prompts[name]


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Refusals of a text for its length name the input that it is."""
    try:
        yield
    except RequestRefused as refused:
        refused.field = f"inputs[{index}]"
        refused.message = f"{refused.field}: {refused.message.removeprefix('text: ')}"
        raise
