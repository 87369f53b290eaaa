"""The messages that clients send, made from Python values."""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from trunkline.sampling_params import Sampling
from trunkline.v1.generation_pb2 import Lane, SamplingParams, ToolCall
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    DetokenizeRequest,
    GenerateRequest,
    TokenIds,
    TokenizeRequest,
    Tool,
    ToolResult,
)
from trunkline.v1.worker_pb2 import Grammar
from trunkline.validation import GRAMMAR_KINDS, LANES

# The fields of OpenAI's messages that are sent, and those that are left out, as routers do over HTTP.
MESSAGE_FIELDS = frozenset({"role", "content", "reasoning", "reasoning_content", "tool_calls"})
RESULT_FIELDS = frozenset({"role", "content", "tool_call_id", "name"})
LEFT_OUT = frozenset({"name", "refusal", "annotations"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
# The kinds of parts of a content, each with the field that has its text.
TEXT_FIELDS = {**dict.fromkeys(("text", "input_text", "output_text"), "text"), "refusal": "refusal"}

# A message: a (role, content) pair, a mapping of OpenAI's form such as {"role": …, "content": …}, or the contract's.
Message = tuple[str, str] | Mapping[str, Any] | ChatMessage
Chat = Sequence[Message] | ChatMessages
# A tool: a mapping of OpenAI's form, {"type": "function", "function": {"name": …}}, or the contract's.
GivenTool = Mapping[str, Any] | Tool
# "auto", "none", "required", or a tool in OpenAI's form: {"type": "function", "function": {"name": …}}.
GivenToolChoice = str | Mapping[str, Any]
# What the answer must be: a kind of grammar and its value, such as {"json_schema": {"type": "object"}} or
# {"regex": "[0-9]+"}; or the contract's. A text is sent as it is, any other value as JSON.
GivenGrammar = Mapping[str, Any] | Grammar
Prompt = str | Sequence[int] | Chat  # text, token ids, or a conversation


class GenerateOptions(Sampling, total=False):
    """The options of generate() and complete()."""

    model: str | None
    n: int | None
    request_id: str
    timeout_s: float | None
    lane: str | None
    session: str
    tools: Sequence[GivenTool]
    tool_choice: GivenToolChoice
    max_reasoning_tokens: int | None
    reasoning_effort: str
    grammar: GivenGrammar | None


def generate_request(
    prompt: Prompt,
    *,
    model: str,
    n: int | None,
    request_id: str,
    lane: str | None,
    tools: Sequence[GivenTool] = (),
    tool_choice: GivenToolChoice = "auto",
    max_reasoning_tokens: int | None = None,
    reasoning_effort: str = "",
    grammar: GivenGrammar | None = None,
    **sampling: Unpack[Sampling],
) -> GenerateRequest:
    """A request with an id: a new one if `request_id` is empty, so that a failure can be looked up in servers' logs.
    Raises ValueError if the lane, a field, the choice of a tool or the kind of the grammar is unknown, if one has a
    wrong value, or if a prompt that is no conversation has tools."""
    request = GenerateRequest(
        model=model,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]  # None is an unset field
        n=n,
        request_id=request_id or uuid.uuid4().hex,
        lane=lane_named(lane),
        grammar=_grammar(grammar),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif not isinstance(prompt, ChatMessages) and all(isinstance(item, int) for item in prompt):
        request.token_ids.CopyFrom(TokenIds(ids=prompt))  # type: ignore[arg-type]
    else:
        request.chat.CopyFrom(_chat(prompt))  # type: ignore[arg-type]
        request.chat.tools.extend(map(_tool, tools if tool_choice != "none" else ()))
        _choose(request.chat, tool_choice)
        if max_reasoning_tokens is not None:
            request.chat.max_reasoning_tokens = max_reasoning_tokens
        request.chat.reasoning_effort = reasoning_effort
        return request
    if tools or tool_choice != "auto" or max_reasoning_tokens is not None or reasoning_effort:
        raise ValueError("tools, and efforts and limits of reasoning, need a conversation as the prompt")
    return request


def tokenize_request(text: str | Chat, *, model: str, special_tokens: bool) -> TokenizeRequest:
    request = TokenizeRequest(model=model, omit_special_tokens=not special_tokens)
    if isinstance(text, str):
        request.text = text
    else:
        request.chat.CopyFrom(_chat(text))
    return request


def detokenize_request(token_ids: Sequence[int], *, model: str, keep_special_tokens: bool) -> DetokenizeRequest:
    return DetokenizeRequest(model=model, token_ids=token_ids, keep_special_tokens=keep_special_tokens)


def _chat(chat: Chat) -> ChatMessages:
    """Raises ValueError if a mapping has a field that cannot be sent, or a part that is no text."""
    return chat if isinstance(chat, ChatMessages) else ChatMessages(messages=map(_message, chat))


def _message(given: Message) -> ChatMessage:
    if isinstance(given, ChatMessage):
        return given
    if not isinstance(given, Mapping):
        role, content = given
        return ChatMessage(role=role, content=content)
    is_result = "tool_call_id" in given
    _check_fields(given, RESULT_FIELDS if is_result else MESSAGE_FIELDS)
    content = given.get("content") or ""
    if is_result:
        result = ToolResult(call_id=given["tool_call_id"], name=given.get("name", ""), parts=_texts(content))
        return ChatMessage(role=given["role"], parts=[ChatPart(tool_result=result)])
    calls = [ChatPart(tool_call=_call(call)) for call in given.get("tool_calls") or ()]
    reasoning = given.get("reasoning") or given.get("reasoning_content")
    if isinstance(content, str) and not calls and not reasoning:
        return ChatMessage(role=given["role"], content=content)
    thoughts = [ChatPart(reasoning=reasoning)] if reasoning else []
    return ChatMessage(role=given["role"], parts=[*thoughts, *_texts(content), *calls])


def _check_fields(given: Mapping[str, Any], known: frozenset[str]) -> None:
    if strange := sorted(name for name, value in given.items() if value and name not in known | LEFT_OUT):
        raise ValueError(f"a message like this must not have {', '.join(strange)}")
    if not given.get("role"):
        raise ValueError("a message must have a role")
    if not given.keys() & (MESSAGE_FIELDS - {"role"}):
        raise ValueError("a message must have content")


def _texts(content: str | Iterable[Mapping[str, Any]]) -> list[ChatPart]:
    if isinstance(content, str):
        return [ChatPart(text=content)] if content else []
    return [ChatPart(text=_text(part)) for part in content]


def _text(part: Mapping[str, Any]) -> str:
    kind = str(part.get("type"))
    text = part.get(TEXT_FIELDS.get(kind, ""))
    if not isinstance(text, str):
        raise ValueError(f"parts of a message must be texts, not {kind}")
    return text


def _call(call: Mapping[str, Any]) -> ToolCall:
    """The arguments are JSON, as OpenAI has them, or an object, as Hugging Face's templates have them."""
    function = _function(call, "call")
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=call.get("id", ""), name=function["name"], arguments=text)


def _tool(given: GivenTool) -> Tool:
    if isinstance(given, Tool):
        return given
    function = _function(given, "tool")
    if strange := sorted(function.keys() - FUNCTION_FIELDS):
        raise ValueError(f"a function must not have {', '.join(strange)}")
    parameters = function.get("parameters")
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=json.dumps(parameters, ensure_ascii=False) if parameters else "",
        strict=bool(function.get("strict")),
    )


def _choose(chat: ChatMessages, choice: GivenToolChoice) -> None:
    """Sets which calls the answer must have."""
    if isinstance(choice, Mapping):
        chat.called_tool = _function(choice, "choice of a tool")["name"]
    elif choice == "required":
        chat.requires_call = True
    elif choice == "none":
        chat.forbids_calls = True
    elif choice != "auto":
        raise ValueError(f"a choice of a tool is 'auto', 'none', 'required' or a function, not {choice!r}")


def _function(given: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Returns the function of a tool or of a call. Raises ValueError if it is of another kind or has no name."""
    function = given.get("function")
    if given.get("type") not in ("function", None) or not isinstance(function, Mapping) or not function.get("name"):
        raise ValueError(f"a {what} must be a function with a name")
    return function


def _grammar(given: GivenGrammar | None) -> Grammar | None:
    if given is None or isinstance(given, Grammar):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"a grammar is a kind with its value, not {type(given).__name__}")
    kind, value = next(iter(given.items()), ("", ""))
    if len(given) != 1 or kind not in GRAMMAR_KINDS:
        raise ValueError(f"a grammar is one of {', '.join(GRAMMAR_KINDS)}, not {', '.join(map(str, given)) or 'empty'}")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the value of {kind} is no JSON: {error}") from None
    return Grammar(kind=GRAMMAR_KINDS[kind], text=text)


def lane_named(name: str | None) -> "Lane.ValueType":
    """The lane; None: the default. Raises ValueError if there is none of this name."""
    if name is None:
        return Lane.LANE_UNSPECIFIED
    if name not in LANES:
        raise ValueError(f"{name!r} is not a lane; allowed: {', '.join(LANES)}")
    return LANES[name]
