"""The syntax of chat templates: Jinja with the tags that Hugging Face's templates use."""

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012  # the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


TAGS = (loopcontrols, GenerationTag)


def syntax_problem(source: str) -> str | None:
    """Returns why a template cannot be parsed, in one line with the line's number; None if it can. Parsing runs no
    template code, whereas compiling does."""
    try:
        Environment(extensions=TAGS, autoescape=False).parse(source)  # prompts are no HTML
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {_one_line(error.message)}"
    except Exception as error:  # lexer and parser raise more than TemplateError, for numbers and depth for example
        return _one_line(error)
    return None


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())
