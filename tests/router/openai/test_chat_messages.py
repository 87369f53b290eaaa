"""Contents of all protocols become messages of the contract in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import ChatMessage, ChatPart
from trunkline_router.edge.chat_messages import Piece, Turn, call_part, chat_message, merged, pieces

CALL = call_part("1", "f", "{}")
CALLED = ChatPart(tool_call=ToolCall(id="1", name="f", arguments="{}"))


@dataclass
class Part:
    """A part as a protocol that serves calls would read it."""

    text: str | None

    def piece(self, where: str) -> Piece:
        assert where.startswith("content[")
        return CALL if self.text is None else self.text


def test_texts_are_a_short_message_whatever_form_they_have() -> None:
    for content, text in (
        ("a\nb", "a\nb"),
        (pieces([Part("a"), Part("b")], "content"), "a\nb"),
        (pieces(None, "content"), ""),
        (pieces([], "content"), ""),
        (pieces("a", "content"), "a"),
    ):
        assert chat_message("user", content) == ChatMessage(role="user", content=text)
    assert chat_message("developer", "x") == ChatMessage(role="system", content="x")


def test_another_part_keeps_its_place_among_the_texts() -> None:
    message = chat_message("assistant", pieces([Part("a"), Part(None), Part("b")], "content"))
    assert message == ChatMessage(role="assistant", parts=[ChatPart(text="a"), CALLED, ChatPart(text="b")])


def test_messages_of_one_role_in_a_row_become_one_of_all_their_parts() -> None:
    turns: list[Turn] = [
        ("user", "a"),
        ("assistant", "b"),
        ("assistant", [CALL]),
        ("assistant", ""),
        ("user", [CALL]),
        ("user", ""),
    ]
    assert [ChatMessage(**fields) for fields in merged(turns)] == [
        ChatMessage(role="user", content="a"),
        ChatMessage(role="assistant", parts=[ChatPart(text="b"), CALLED]),
        ChatMessage(role="user", parts=[CALLED]),
    ]


CONTENTS: st.SearchStrategy[str | Sequence[Piece]] = st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3)


@given(st.lists(st.tuples(st.sampled_from("ab"), CONTENTS)))
def test_merging_keeps_every_text_and_no_two_neighbours_of_one_role(turns: list[Turn]) -> None:
    messages = [ChatMessage(**fields) for fields in merged(turns)]
    assert all(one.role != other.role for one, other in pairwise(messages))
    texts = [str(piece) for _, content in turns for piece in content]
    assert "".join(texts).replace("\n", "") == "".join(message.content for message in messages).replace("\n", "")
