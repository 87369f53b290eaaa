"""The syntax of chat templates: Jinja with the tags that Hugging Face's templates use."""

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

# Parsing this many takes up to a second. Published templates rarely have more than 20,000.
MAX_TEMPLATE_CHARACTERS = 128 << 10


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it only is a scope, as in transformers: names
    that are set in it do not exist after it."""

    tags = {"generation"}  # noqa: RUF012  # the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


TAGS = (loopcontrols, GenerationTag)


def syntax_problem(source: str) -> str | None:
    """Returns why a template is too long or cannot be parsed, in one line with the line's number; None if it can.
    Parsing runs no template code, whereas compiling does."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        return f"it has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are supported"
    try:
        Environment(extensions=TAGS, autoescape=False).parse(source)  # prompts are no HTML
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {_one_line(error.message)}"
    except Exception as error:  # lexer and parser raise more than TemplateError, for numbers and depth for example
        return _one_line(error)
    return None


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())
