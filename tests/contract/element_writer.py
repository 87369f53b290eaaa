"""Texts of the elements that grammars of answers consist of."""

import json
import random
from typing import Any

from tests.contract.call_grammars import DSML


class Writer:
    """Writes texts that elements allow, at random. A schema lists its values."""

    def __init__(self, seed: int, text: str = "so, ") -> None:
        self._random = random.Random(seed)
        self._text = text

    def of(self, element: Any) -> str:  # noqa: C901  # a case for each kind
        match element:
            case {"type": "const_string", "value": value}:
                return str(value)
            case {"type": "any_text"}:
                return self._text
            case {"type": "regex", "pattern": pattern}:
                return {":[0-9]+": ":0", "\\n{1,2}": "\n\n"}[pattern]
            case {"type": "sequence", "elements": elements}:
                return "".join(map(self.of, elements))
            case {"type": "or", "elements": elements}:
                return self.of(self._random.choice(elements))
            case {"type": "optional", "content": content}:
                return self._random.choice(["", self.of(content)])
            case {"type": "star", "content": content}:
                return "".join(self.of(content) for _ in range(self._random.randrange(3)))
            case {"type": "tag", "begin": begin, "content": content, "end": end}:
                return f"{begin}{self.of(content)}{end}"
            case {"type": "tags_with_separator", "tags": tags, "separator": separator, "stop_after_first": stops}:
                times = 1 if stops else self._random.randrange(1, 4)
                return str(separator).join(self.of(self._random.choice(tags)) for _ in range(times))
            case {"type": "triggered_tags", "triggers": [mark], "tags": tags, "stop_after_first": stops}:
                assert all(tag["begin"].startswith(mark) for tag in tags)
                called = self.of(self._random.choice(tags)) if self._random.random() < 0.8 else ""
                return f"{self._text}{called}{'' if called and stops else self._text}"
            case {"type": "json_schema", "json_schema": schema, "style": style}:
                return self._arguments(schema, style)
            case {"type": "json_schema", "json_schema": schema}:
                return json.dumps(self._random.choice(schema["enum"]))
        raise AssertionError(element)

    def _arguments(self, schema: Any, style: str) -> str:
        values = {
            key: self._random.choice(inner["enum"])
            for key, inner in schema["properties"].items()
            if key in schema.get("required", ()) or self._random.random() < 0.7
        }
        if style == "json":
            return json.dumps(values, ensure_ascii=False)
        written = {
            "qwen_xml": "<parameter={0}>\n{1}\n</parameter>",
            "glm_xml": "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>",
            "deepseek_xml": f'<{DSML}parameter name="{{0}}" string="{{2}}">{{1}}</{DSML}parameter>',
        }[style]
        raw = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        are_strings = {key: json.dumps(isinstance(value, str)) for key, value in values.items()}
        return "\n".join(written.format(key, value, are_strings[key]) for key, value in raw.items())
