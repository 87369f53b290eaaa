/** The attempts of a request: one for each worker that it was sent to. */

import { h } from "./dom.js";
import { count, duration } from "./format.js";
import { timeBar } from "./waterfall.js";

/** @typedef {import("./fleet_view").Attempt} Attempt @typedef {import("./fleet_view").ChoiceTimeline} ChoiceTimeline */

/** @param {Attempt[]} attempts @param {number} wholeS */
export function attemptsTable(attempts, wholeS) {
  const rows = attempts.map((attempt) => {
    const sum = (/** @type {(choice: ChoiceTimeline) => number} */ of) =>
      attempt.choices.reduce((total, choice) => total + of(choice), 0);
    const longest = Math.max(0, ...attempt.choices.flatMap((choice) => choice.gaps.map((gap) => gap.duration_s)));
    const gaps = sum((choice) => choice.num_gaps);
    const end = attempt.end_s ?? wholeS;
    return h(
      "tr",
      {},
      h("th", { scope: "row", class: "mono" }, attempt.worker_id ?? "a worker"),
      h("td", { class: "bar-cell" }, timeBar(attempt.start_s, end - attempt.start_s, wholeS)),
      h("td", { class: "number" }, duration(attempt.start_s)),
      h("td", { class: "number" }, duration(attempt.first_output_s)),
      h("td", { class: "number" }, duration(attempt.end_s)),
      h("td", {}, attempt.ended || "running"),
      h("td", { class: "number" }, attempt.resumed_at_tokens > 0 ? count(attempt.resumed_at_tokens) : "–"),
      h("td", { class: "number" }, count(sum((choice) => choice.preemptions))),
      h("td", { class: "number" }, gaps > 0 ? `${count(gaps)}, longest ${duration(longest)}` : "none"),
      h("td", { class: "number" }, duration(sum((choice) => choice.device_s))),
    );
  });
  const numbers = ["Sent after", "First output", "Ended after"];
  return h(
    "div",
    { class: "wide", role: "region", "aria-label": "Attempts", tabindex: "0" },
    h(
      "table",
      { class: "rows small waterfall" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "Worker"),
          h("th", { scope: "col", class: "bar-cell" }, h("span", { class: "visually-hidden" }, "Place in time")),
          ...numbers.map((name) => h("th", { scope: "col", class: "number" }, name)),
          h("th", { scope: "col" }, "Ended"),
          ...["Resumed at token", "Preemptions", "Gaps over the target", "Device time"].map((name) =>
            h("th", { scope: "col", class: "number" }, name),
          ),
        ),
      ),
      h("tbody", {}, ...rows),
    ),
  );
}

/** Says how attempts failed, and how long it took until the next one answered. @param {Attempt[]} attempts */
export function failures(attempts) {
  return attempts
    .map((attempt, place) => ({ attempt, next: attempts[place + 1] }))
    .filter(({ attempt, next }) => attempt.end_s !== null && (next !== undefined || attempt.problem !== ""))
    .map(({ attempt, next }) => {
      const why = attempt.problem || attempt.ended;
      const ended = `${attempt.worker_id ?? "A worker"} was given up after ${duration(attempt.end_s)}: ${why}.`;
      if (next === undefined || next.first_output_s === null) return h("p", {}, ended);
      const silence = duration(next.first_output_s - (attempt.end_s ?? 0));
      const from = next.resumed_at_tokens > 0 ? `, and went on after token ${count(next.resumed_at_tokens)}` : "";
      return h("p", {}, `${ended} ${next.worker_id ?? "Another one"} answered ${silence} later${from}.`);
    });
}

/** The steps that computed the prompt, for each choice that has any. @param {Attempt[]} attempts */
export function chunksTable(attempts) {
  return attempts.flatMap((attempt, place) =>
    attempt.choices
      .filter((choice) => choice.chunks.length > 0)
      .map((choice, index) => {
        const rows = choice.chunks.map((chunk) =>
          h(
            "tr",
            {},
            h("th", { scope: "row", class: "number" }, duration(chunk.start_s)),
            ...[
              duration(chunk.duration_s),
              count(chunk.tokens),
              count(chunk.step_prefill_tokens),
              count(chunk.step_decode_tokens),
              count(chunk.step_padding_tokens),
              count(chunk.step_sequences),
            ].map((text) => h("td", { class: "number" }, text)),
          ),
        );
        const of = attempt.choices.length > 1 ? `, choice ${index + 1}` : "";
        const heads = ["Began after", "Took", "Own tokens", "Prefill in step", "Decode in step", "Padding", "Sequences"];
        return h(
          "details",
          { "data-name": `${place}-${index}` },
          h("summary", {}, `Prefill on ${attempt.worker_id ?? "a worker"}${of}: ${choice.chunks.length === 1 ? "one chunk" : `${choice.chunks.length} chunks`}`),
          h(
            "div",
            { class: "wide", role: "region", "aria-label": `Prefill chunks on ${attempt.worker_id ?? "a worker"}${of}`, tabindex: "0" },
            h(
              "table",
              { class: "rows small" },
              h("thead", {}, h("tr", {}, ...heads.map((name) => h("th", { scope: "col", class: "number" }, name)))),
              h("tbody", {}, ...rows),
            ),
          ),
        );
      }),
  );
}
