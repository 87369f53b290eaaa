"""Texts that must not be written anywhere: where they are sent is known by their names."""

import base64
import urllib.parse


class Canaries:
    """Makes canaries, and finds them again in any of the forms in which programs write text."""

    def __init__(self) -> None:
        self._planted: dict[str, str] = {}

    def plant(self, place: str) -> str:
        """A text of letters and digits for this place, another one each time."""
        text = f"zQ{len(self._planted):03}canary{place.replace(' ', '')}Xk"
        self._planted[text] = place
        return text

    def keep(self, place: str, text: str) -> str:
        """Remembers a given text, such as an answer."""
        assert len(text) >= 8, f"{text!r} may appear by chance"
        self._planted[text] = place
        return text

    @property
    def num_planted(self) -> int:
        return len(self._planted)

    def found(self, written: str | bytes) -> list[str]:
        """The places whose canaries appear in what was written, each with some of the text around it."""
        data = written.encode("utf-8", "surrogateescape") if isinstance(written, str) else written
        lower, found = data.lower(), []
        for text, place in self._planted.items():
            for form in _forms(text):
                at = lower.find(form.lower())
                if at >= 0:
                    found.append(f"{place}: …{data[max(0, at - 80) : at + 120]!r}…")
                    break
        return found


def _forms(text: str) -> set[bytes]:
    plain = text.encode()
    # Of the three ways in which a text can lie in base64, without the characters that depend on its neighbours.
    in_base64 = {base64.b64encode(b"-" * shift + plain)[4 if shift else 0 : -4] for shift in range(3)}
    quoted = {urllib.parse.quote(text).encode(), repr(text)[1:-1].encode(), text.encode("unicode_escape")}
    return {plain, plain.hex().encode(), *quoted, *in_base64}
