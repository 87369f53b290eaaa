"""An MCP server with one tool, over standard input and output."""

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: 18 degrees and clear"


if __name__ == "__main__":
    server.run()
