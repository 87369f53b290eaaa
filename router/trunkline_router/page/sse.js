/** Server-sent events of a response's body. EventSource cannot send a header, and the key must not be in an address. */

/** @typedef {{event: string, data: string}} ServerEvent */

/**
 * Yields the events of a response as they come. Ends when the response does.
 * @param {Response} response
 * @returns {AsyncGenerator<ServerEvent, void, void>}
 */
export async function* serverEvents(response) {
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.take(value);
    }
  } finally {
    await reader.cancel().catch(() => undefined);  // it may have failed already
  }
}

/** Cuts text into events. Comments, which keep idle connections open, are left out. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.event = "";
    /** @type {string[]} */
    this.data = [];
  }

  /**
   * @param {string} text  the next piece, cut anywhere
   * @returns {Generator<ServerEvent, void, void>}
   */
  *take(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop() ?? "";
    for (const ended of lines) {
      const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
      if (line !== "") this.#field(line);
      else if (this.data.length > 0) {
        yield { event: this.event || "message", data: this.data.join("\n") };
        this.event = "";
        this.data = [];
      }
    }
  }

  /** @param {string} line */
  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (name === "event") this.event = value;
    else if (name === "data") this.data.push(value);
  }
}
