"""What the parts of an answer add up to."""

from trunkline.answer.answer_items import REASONING, TEXT, TOOL_CALL, AnswerItems, JoinedText, calls_tools
from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, ToolCallEnd


def test_neighbouring_parts_of_one_kind_are_one_item() -> None:
    items = AnswerItems()
    parts = (
        AnswerPart(reasoning="a"),
        AnswerPart(reasoning="b"),
        AnswerPart(text="c"),
        AnswerPart(tool_call=ToolCall(id="1", name="f", arguments="{")),
        AnswerPart(arguments="}"),
        AnswerPart(tool_call_end=ToolCallEnd()),
        AnswerPart(text="d"),
    )
    assert [items.take(part) for part in parts] == [True, False, True, True, False, False, True]
    assert [(item.kind, item.text) for item in items.items] == [
        (REASONING, "ab"),
        (TEXT, "c"),
        (TOOL_CALL, "{}"),
        (TEXT, "d"),
    ]
    assert items.text == "c\nd"
    text = JoinedText()
    assert [text.of(part.text) for part in parts] == ["", "", "c", "", "", "", "\nd"]
    [call] = items.calls
    assert (call.call_id, call.name, call.is_complete) == ("1", "f", True)


def test_calls_are_run_if_all_are_complete() -> None:
    items = AnswerItems()
    items.take(AnswerPart(text="a"))
    assert not calls_tools(items.items)
    items.take(AnswerPart(tool_call=ToolCall(id="1", name="f")))
    items.take(AnswerPart(arguments='{"a": '))
    assert not calls_tools(items.items)
    items.take(AnswerPart(tool_call_end=ToolCallEnd()))
    items.take(AnswerPart(text="b"))
    assert calls_tools(items.items)
    items.take(AnswerPart(tool_call=ToolCall(id="2", name="f")))
    assert not calls_tools(items.items)
