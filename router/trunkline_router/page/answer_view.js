/** Shows an answer as it comes: reasoning, text and calls of tools, in their order. */

import { fill, h } from "./dom.js";

/** @typedef {{index: number, function?: {name?: string, arguments?: string}}} CallDelta */
/** @typedef {{content?: string | null, reasoning?: string, reasoning_content?: string, tool_calls?: CallDelta[]}} Delta */

const DEEPEST_INDENT = 20;

export class AnswerView {
  /** @param {HTMLElement} output */
  constructor(output) {
    this.output = output;
    this.part = ""; // the one that the last piece belongs to
    this.text = new Text(); // of the part
    /** @type {HTMLElement | null} */
    this.caption = null; // of a call that may go on
  }

  clear() {
    fill(this.output);
    this.part = "";
    this.caption = null;
  }

  /**
   * Adds what an event brought.
   * @param {Delta} delta
   * @returns {boolean}  whether it brought anything
   */
  add({ content, reasoning, reasoning_content, tool_calls }) {
    const thought = reasoning ?? reasoning_content;
    if (thought) this.#textOf("reasoning", reasoningPart).appendData(thought);
    if (content) this.#textOf("text", (text) => text).appendData(content);
    for (const { index, function: told } of tool_calls ?? []) {
      const text = this.#textOf(`call ${index}`, (text) => this.#callPart(text, told?.name ?? ""));
      text.appendData(told?.arguments ?? "");
    }
    if (!thought && !content && !tool_calls?.length) return false;
    this.output.scrollTop = this.output.scrollHeight;
    return true;
  }

  /** Ends the answer. @param {boolean} isCallComplete  whether the call at its end, if there is one, was written to its end */
  end(isCallComplete) {
    if (this.caption === null) return;
    const shown = isCallComplete ? indented(this.text.data) : null;
    if (shown === null) this.caption.append(" · cut off");
    else this.text.data = shown;
    this.caption = null;
  }

  /** @param {string} part @param {(text: Text) => Node} make @returns {Text} */
  #textOf(part, make) {
    if (part !== this.part) {
      this.end(true);
      this.part = part;
      this.text = new Text();
      this.output.append(make(this.text));
    }
    return this.text;
  }

  /** @param {Text} text @param {string} name */
  #callPart(text, name) {
    this.caption = h("figcaption", {}, "Calls ", h("code", {}, name));
    return h("figure", {}, this.caption, h("pre", {}, text));
  }
}

/** @param {Text} text */
function reasoningPart(text) {
  return h("details", {}, h("summary", {}, "Reasoning"), text);
}

/**
 * JSON in indented lines. Its strings and numbers stay as they were written.
 * @param {string} json
 * @returns {string | null}  null: it is not JSON
 */
export function indented(json) {
  try {
    JSON.parse(json);
  } catch {
    return null;
  }
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, DEEPEST_INDENT))}`;
  return json.replace(/"(?:[^"\\]|\\.)*"|\{\s*\}|\[\s*\]|[{}[\],:]|\s+/g, (token) => {
    switch (token) {
      case "{":
      case "[":
        depth += 1;
        return token + line();
      case "}":
      case "]":
        depth -= 1;
        return line() + token;
      case ",":
        return token + line();
      case ":":
        return ": ";
      default:
        return token.startsWith('"') ? token : token.replace(/\s+/, "");
    }
  });
}
