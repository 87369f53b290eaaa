"""A conversation with a call of a tool, made of canaries, as each protocol has it; and forms that are refused."""

import json
from dataclasses import dataclass
from typing import Any, Self

from tests.cluster.canaries import Canaries
from trunkline.v1.inference_pb2 import Tool

Body = dict[str, Any]
Asked = list[tuple[int, str, Body]]  # the status that answers it, a path, and a body


@dataclass(frozen=True)
class ToolTalk:
    """question: the last message, which the model answers with a call"""

    asked: str
    thought: str
    said: str
    call_id: str
    name: str
    arguments: dict[str, str]
    result: str
    question: str
    function: dict[str, Any]
    no_json: str
    no_schema: str

    @classmethod
    def planted(cls, canaries: Canaries, question: str) -> Self:
        plant = canaries.plant
        name, argument = plant("tool"), plant("argument of a tool")
        properties = {argument: {"type": "string", "description": plant("description of an argument")}}
        schema = {"type": "object", "properties": properties, "required": [argument]}
        return cls(
            asked=plant("earlier question"),
            thought=plant("earlier reasoning"),
            said=plant("earlier text"),
            call_id=plant("call id"),
            name=name,
            arguments={argument: plant("earlier argument")},
            result=plant("earlier result"),
            question=question,
            function={"name": name, "description": plant("description of a tool"), "parameters": schema},
            no_json=plant("arguments that are no JSON"),
            no_schema=plant("a schema that is no JSON"),
        )

    @property
    def tool(self) -> Body:
        return {"type": "function", "function": self.function}

    def messages(self, arguments: str | None = None) -> list[Body]:
        """OpenAI's, which the clients take too."""
        arguments = json.dumps(self.arguments) if arguments is None else arguments
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}
        return [
            {"role": "user", "content": self.asked},
            {"role": "assistant", "content": self.said, "reasoning": self.thought, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": self.call_id, "content": self.result},
            {"role": "user", "content": self.question},
        ]

    def refused_calls(self) -> list[tuple[list[Body], Body | Tool]]:
        """Messages and a tool each, over gRPC."""
        return [
            (self.messages(self.no_json), self.tool),
            (self.messages(), Tool(name=self.name, parameters=self.no_schema)),
            (self.messages(), Tool(description=self.function["description"])),
        ]

    def of_chat(self) -> Asked:
        whole = {"messages": self.messages(), "tools": [self.tool]}
        path, named = "/v1/chat/completions", {"type": "function", "function": {"name": f"{self.name}?"}}
        return [
            (200, path, whole),
            (200, path, {**whole, "stream": True}),
            (400, path, {**whole, "messages": self.messages(self.no_json)}),
            (400, path, {**whole, "tool_choice": named}),
            (400, path, {**whole, "tools": [{"type": "custom", "custom": {"name": self.name}}]}),
            (
                400,
                path,
                {**whole, "tools": [{**self.tool, "function": {**self.function, "parameters": self.no_schema}}]},
            ),
        ]

    def of_messages(self) -> Asked:
        turns: list[Body] = [
            {"role": "user", "content": self.asked},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": self.thought, "signature": self.no_json},
                    {"type": "redacted_thinking", "data": self.no_schema},
                    {"type": "text", "text": self.said},
                    {"type": "tool_use", "id": self.call_id, "name": self.name, "input": self.arguments},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": self.call_id, "content": self.result}]},
            {"role": "user", "content": self.question},
        ]
        strange = {"role": "assistant", "content": [{"type": "server_tool_use", "id": self.call_id, "name": self.name}]}
        function = self.function
        tool = {"name": self.name, "description": function["description"], "input_schema": function["parameters"]}
        path, whole = "/v1/messages", {"messages": turns, "tools": [tool], "max_tokens": 500}
        return [
            (200, path, whole),
            (200, path, {**whole, "stream": True}),
            (400, path, {**whole, "messages": [turns[0], strange]}),
            (400, path, {**whole, "tool_choice": {"type": "tool", "name": f"{self.name}?"}}),
            (400, path, {**whole, "tools": [{**tool, "input_schema": self.no_schema}]}),
            (400, path, {**whole, "tools": [{"type": "bash_20250124", "name": self.name}]}),
            (200, path, {**whole, "tools": [{"type": "web_search_20250305", "name": self.name}]}),
        ]

    def of_responses(self) -> Asked:
        thought = {"type": "reasoning_text", "text": self.thought}
        call = {"type": "function_call", "call_id": self.call_id, "name": self.name}
        items: list[Body] = [
            {"role": "user", "content": self.asked},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
            {"role": "assistant", "content": self.said},
            {**call, "arguments": json.dumps(self.arguments)},
            {"type": "function_call_output", "call_id": self.call_id, "output": self.result},
            {"role": "user", "content": self.question},
        ]
        path, tool = "/v1/responses", {"type": "function", **self.function}
        whole = {"input": items, "tools": [tool], "store": True}
        return [
            (200, path, whole),
            (200, path, {**whole, "stream": True}),
            (400, path, {**whole, "input": [items[0], {**call, "arguments": self.no_json}]}),
            (400, path, {**whole, "tool_choice": {"type": "function", "name": f"{self.name}?"}}),
            (400, path, {**whole, "tools": [{"type": "computer_use_preview", "name": self.name}]}),
            (200, path, {**whole, "tools": [{"type": "custom", "name": self.name}]}),
        ]
