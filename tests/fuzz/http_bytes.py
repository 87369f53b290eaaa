"""Byte streams for the HTTP port: valid requests, and what a damaged client or an attacker makes of them."""

from random import Random

from tests.fuzz.mutations import damaged

HOST, JSON, CHUNKED = b"Host: localhost\r\n", b"Content-Type: application/json\r\n", b"Transfer-Encoding: chunked\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":2'
BODIES = (
    (b"/v1/completions", b'{"model":"tiny","prompt":"hi","max_tokens":2}'),
    (
        b"/v1/completions",
        b'{"model":"tiny","prompt":["hi","ho"],"max_tokens":2,"stream":true,"logprobs":2,"echo":true}',
    ),
    (b"/v1/chat/completions", CHAT + b',"stream":true}'),
    (b"/v1/messages", CHAT + b',"stream":true}'),
    (b"/v1/messages/count_tokens", CHAT.replace(b',"max_tokens":2', b"") + b"}"),
    (b"/v1/responses", b'{"model":"tiny","input":"hi","stream":true}'),
    (b"/tokenize", b'{"prompt":"hi"}'),
    (b"/fleet/workers/none/drain", b'{"timeout_s":1}'),
    (b"/fleet/workers/none/undrain", b"{}"),
    (b"/detokenize", b'{"tokens":[100]}'),
    (b"/v1/embeddings", b'{"model":"tiny","input":["hi","ho"],"encoding_format":"base64"}'),
    (b"/pooling", b'{"model":"tiny","input":[[100,101],[102]]}'),
    (b"/classify", b'{"model":"tiny","input":"hi"}'),
    (b"/v1/rerank", b'{"model":"tiny","query":"hi","documents":["ho",{"text":"ha"}]}'),
    (b"/rerank", b'{"query":"hi","documents":["ho"],"top_n":1}'),
    (b"/v2/rerank", b'{"model":"tiny","query":"hi","documents":["ho"]}'),
    (b"/v1/score", b'{"model":"tiny","text_1":"hi","text_2":["ho","ha"]}'),
    (b"/score", b'{"queries":"hi","documents":"ho"}'),
)


def post(path: bytes, body: bytes, more: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\n%b%b%b%b\r\n%b" % (path, HOST, JSON, length, more, body)


def in_chunks(path: bytes, body: bytes, size: int, trailers: bytes = b"") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"POST %b HTTP/1.1\r\n%b%b%b\r\n" % (path, HOST, JSON, CHUNKED)
    return head + chunks + b"0\r\n" + trailers + b"\r\n"


def get(path: bytes, more: bytes = b"", method: bytes = b"GET") -> bytes:
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, path, HOST, more)


VALID = (
    *(post(path, body) for path, body in BODIES),
    *(in_chunks(path, body, 7) for path, body in BODIES),
    in_chunks(*BODIES[0], 1, b"Authorization: Bearer x\r\nA: b\r\n"),
    post(*BODIES[0], H2C),
    in_chunks(*BODIES[0], 9).replace(HOST, HOST + H2C),
    post(*BODIES[0], b"Expect: 100-continue\r\n"),
    post(*BODIES[0], b"Connection: close\r\n"),
    post(*BODIES[0]).replace(b"HTTP/1.1", b"HTTP/1.0"),
    *(get(path) for path in (b"/health", b"/ready", b"/version", b"/v1/models", b"/v1/models/tiny", b"/v1/models/a/b",
                             b"/v1/responses/resp_x", b"/nothing", b"/", b"/page/main.js",
                             b"/fleet/requests?limit=5", b"/fleet/requests/%ff/x", b"/tokenize", b"/v1/completions/",
                                 b"http://y/health",
                             b"/v1/responses/%ff%00?stream=true&a=%f0&include[]=x", b"*", b"/" + b"a" * 9000)),
    *(get(b"/v1/models", method=method) for method in (b"HEAD", b"OPTIONS", b"DELETE", b"PUT", b"TRACE", b"PATCH")),
    get(b"/v1/responses/x", method=b"DELETE"),
    get(b"/health") * 16 + post(*BODIES[0]),
    get(b"/health") * 17,
    b"".join(post(path, body) for path, body in BODIES),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n",
)  # fmt: skip

PIECES = (
    *(b"\x00", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b" ", b"\t", b":", b"\xff", b"\x80", b"%", b"%00", b"%ff"),
    *(b"\r\n folded", b"\r\n\tfolded: b", b"A: b\r\n", b"A : b\r\n", b": b\r\n", b"A\r\n", b"A: \x00\r\n",
        b"A: \xff\r\n"),
    *(b"Content-Length: 0\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: +5\r\n"),
    *(b"Content-Length: 5, 5\r\n", b"Content-Length: 0x5\r\n", b"Content-Length: 99999999999999999999\r\n"),
    *(b"Content-Length: 18446744073709551615\r\n", b"Content-Length: \r\n",
        b"content-length:5\r\nCONTENT-LENGTH:6\r\n"),
    *(CHUNKED, b"Transfer-Encoding: gzip\r\n", b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n"),
    *(b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b"TE: trailers\r\n"),
    *(b"0\r\n\r\n", b"5\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"ffffffffffffffff\r\n", b"10000000000000000\r\n",
        b"-1\r\n"),
    *(b"5\nhello\n", b"0x5\r\nhello\r\n", b" 5\r\nhello\r\n", b"1;" + b"a" * 70_000, b"1\r\nx\r\n" * 3000),
    *(H2C, b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Upgrade: h2c\r\n", b"Connection: upgrade\r\n"),
    *(b"Connection: close\r\n", b"Connection: keep-alive, close\r\n", b"Connection: x\r\n", b"Keep-Alive: 9\r\n"),
    *(b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"Expect: 100-continue\r\nExpect: x\r\n"),
    *(b"Host: \r\n", b"Host: [\r\n", b"Host: [::1\r\n", b"Host: a b\r\n", b"Host: x:99999999\r\n", b"Host: \xff\r\n",
      b"Host: x/..?#@\r\n", b"Host: x@[v1.y]:1\r\n"),
    *(b"Content-Type: text/plain\r\n", b"Content-Type: \xff\r\n", b"Content-Encoding: gzip\r\n", b"Content-Type: \r\n"),
    *(b"X-Request-Id: a\r\n", b"X-Request-Id: " + b"a" * 200 + b"\r\n", b"X-Request-Id: \xe9\r\n",
        b"X-Request-Id: \r\n"),
    *(b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01\r\n", b"tracestate: a=b,\xff\r\n",
        b"traceparent: \xff\r\n"),
    b"traceparent: cc-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01-\xff\r\n",
    *(b"Authorization: Bearer x\r\n", b"Authorization: Basic eDp5\r\n", b"Authorization: \xff\r\n",
        b"x-api-key: \xff\r\n"),
    *(b"x-trunkline-tenant: a\r\n", b"x-trunkline-tenant: \xff\r\n", b"x-trunkline-session: " + b"s" * 5000 + b"\r\n"),
    *(b"Origin: http://x\r\n", b"Access-Control-Request-Method: POST\r\n", b"Cookie: a=b\r\n" * 20),
    *(b"A: " + b"b" * 40_000 + b"\r\n", b"A: b\r\n" * 200, b"A" * 40_000, b"a" * 9000, b"?" * 300, b"#", b"//",
        b"/../"),
    *(b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/11", b"http/1.1", b"GET", b"POST ", b"M-SEARCH",
        b"QUERY"),
    *(b'"stream":true', b"\\ud800", b"{", b"[" * 100, b"[" * 70_000, b'"' * 1000, b"\xf0\x9f", b"NaN", b"1e999"),
)  # fmt: skip


def case(seed: int) -> list[bytes]:
    """What one connection sends: a few writes."""
    draw = Random(seed)
    data = b"".join(draw.choices(VALID, k=draw.choice((1, 1, 1, 2, 3))))
    if draw.random() < 0.95:
        data = damaged(draw, data, PIECES, VALID)
    cuts = sorted(draw.randint(0, len(data)) for _ in range(draw.choice((0, 0, 1, 2))))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
