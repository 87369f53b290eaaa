/** Sends a request through the API that all clients use, and shows the answer as it comes. */

import { AnswerView } from "./answer_view.js";
import { Refused } from "./api.js";
import { byId, fill, h, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { serverEvents } from "./sse.js";

/** @typedef {{startedAt: number, firstAt: number | null, lastAt: number, pieces: number, tokens: number | null, finish: string}} Answer */

export class Playground {
  /** @param {import("./api.js").Api} api @param {(requestId: string) => void} openTimeline */
  constructor(api, openTimeline) {
    this.api = api;
    this.openTimeline = openTimeline;
    this.models = byId("play-model");
    this.send = byId("play-send");
    this.stop = byId("play-stop");
    this.view = new AnswerView(byId("play-answer"));
    this.endpoint = byId("play-endpoint");
    this.tools = byId("play-tools");
    this.facts = byId("play-facts");
    this.state = h("span");
    this.link = h("button", { type: "button", class: "link", onclick: () => this.openTimeline(this.requestId) }, "Where did its time go?");
    this.requestId = "";
    /** @type {AbortController | null} */
    this.running = null;
    byId("playground-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#ask();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    this.endpoint.addEventListener("change", () => { this.tools.disabled = !this.#isChat; });
    this.tools.addEventListener("input", () => this.tools.setCustomValidity(jsonProblem(this.tools.value)));
  }

  /** Offers these models. @param {string[]} models */
  offer(models) {
    const offered = [.../** @type {HTMLOptionsCollection} */ (this.models.options)].map((option) => option.value);
    if (offered.join("\n") === models.join("\n")) return;
    const chosen = this.models.value;
    fill(this.models, ...models.map((model) => h("option", { value: model }, model)));
    if (models.includes(chosen)) this.models.value = chosen;
  }

  /** Ends a running request and forgets the last answer. */
  clear() {
    this.running?.abort();
    this.view.clear();
    fill(this.facts);
  }

  async #ask() {
    const attempt = new AbortController();
    this.running = attempt;
    this.send.disabled = true;
    this.stop.disabled = false;
    this.view.clear();
    fill(this.facts, this.state);
    setText(this.state, "Waiting for the first token …");
    const answer = { startedAt: performance.now(), firstAt: null, lastAt: 0, pieces: 0, tokens: null, finish: "" };
    try {
      const response = await this.api.post(this.endpoint.value, this.#request(), attempt.signal);
      this.requestId = response.headers.get("x-request-id") ?? "";
      await this.#read(response, answer, attempt.signal);
      setText(this.state, facts(answer, answer.finish === "" ? "ended" : `ended (${answer.finish})`));
    } catch (error) {
      if (attempt.signal.aborted) setText(this.state, facts(answer, "stopped"));
      else if (error instanceof Refused || error instanceof TypeError || error instanceof AnswerFailed) {
        setText(this.state, `✕ ${error instanceof TypeError ? "the connection to the router was lost" : error.message}`);
        if (error instanceof Refused) this.requestId = error.requestId;
      } else throw error;
    } finally {
      this.view.end(answer.finish === "tool_calls");
      const focusIsLost = document.activeElement === this.stop;
      this.running = null;
      this.send.disabled = false;
      this.stop.disabled = true;
      if (focusIsLost) this.send.focus();
      if (this.requestId !== "" && this.facts.childNodes.length > 0) fill(this.facts, this.state, " · ", this.link);
    }
  }

  get #isChat() {
    return this.endpoint.value.endsWith("chat/completions");
  }

  #request() {
    const prompt = byId("play-prompt").value;
    const tools = this.#isChat ? this.tools.value.trim() : "";
    return {
      model: this.models.value,
      ...(this.#isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      ...(tools === "" ? {} : { tools: JSON.parse(tools) }),
      max_tokens: Number(byId("play-max-tokens").value),
      temperature: Number(byId("play-temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** @param {Response} response @param {Answer} answer @param {AbortSignal} signal */
  async #read(response, answer, signal) {
    for await (const { data } of serverEvents(response)) {
      signal.throwIfAborted(); // events that had arrived before the user stopped are not shown
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new AnswerFailed(chunk.error.message);
      const choice = chunk.choices?.[0];
      answer.finish = choice?.finish_reason ?? answer.finish;
      answer.tokens = chunk.usage?.completion_tokens ?? answer.tokens;
      if (!this.view.add(choice?.delta ?? { content: choice?.text })) continue;
      answer.lastAt = performance.now();
      answer.firstAt ??= answer.lastAt;
      answer.pieces += 1;
      setText(this.state, facts(answer, "streaming"));
    }
  }
}

/** An error that came after the first event. */
class AnswerFailed extends Error {}

/** Why a text is not JSON. @param {string} text @returns {string}  "": it is JSON, or blank */
function jsonProblem(text) {
  try {
    if (text.trim() !== "") JSON.parse(text);
    return "";
  } catch (error) {
    return `This is not JSON: ${/** @type {SyntaxError} */ (error).message}`;
  }
}

/** @param {Answer} answer @param {string} state */
function facts({ startedAt, firstAt, lastAt, pieces, tokens }, state) {
  if (firstAt === null) return `${state[0].toUpperCase()}${state.slice(1)} without output`;
  const seconds = (lastAt - firstAt) / 1000;
  // Before the usage comes, the number of tokens is not known: an event may have several.
  const speed = tokens !== null && tokens > 1 && seconds > 0 ? `${count((tokens - 1) / seconds)} tok/s` : "";
  const length = tokens === null ? `${count(pieces)} events so far` : `${count(tokens)} tokens`;
  return [state, `first token ${duration((firstAt - startedAt) / 1000)}`, length, speed].filter(Boolean).join(" · ");
}
