/** The parts of a time to first token, in words. */

import { duration, percent } from "./format.js";
import { isRefusedAtOnce, refusal, refusalAdvice } from "./refusal.js";

/** @typedef {import("./fleet_view").RequestDetail} RequestDetail */

const SHORT_SHARE = 0.01;

/**
 * Part → its name in a table, and what happened in a sentence.
 * @type {Record<string, {short: string, sentence: string, advice: string}>}
 */
export const CAUSES = {
  admission: {
    short: "admission",
    sentence: "waited until its tenant's quotas were reserved",
    advice: "They are reserved in Redis: look at Redis.",
  },
  tokenizer: {
    short: "tokenizing",
    sentence: "waited until its prompt was tokenized",
    advice: "The prompt is long, or many long prompts were tokenized at the same time.",
  },
  placement: {
    short: "finding a worker",
    sentence: "waited for a worker that could take it",
    advice: "No worker was ready, or all were full, or it was tried again after a pause: see Workers.",
  },
  queue: {
    short: "queue",
    sentence: "waited in a worker's queue",
    advice: "The fleet is short of compute, or its load is not balanced: compare the workers below.",
  },
  kv_pressure: {
    short: "waiting for KV",
    sentence: "waited for KV blocks, or was computed again after it had lost them",
    advice: "The worker's KV pool was full of running requests: the fleet is short of KV.",
  },
  prefill: {
    short: "prefill",
    sentence: "had its prompt computed",
    advice: "Compare the cached tokens with the prompt's: what no cache had was computed, in the chunks below.",
  },
  decode_interference: {
    short: "other decodes",
    sentence: "shared its worker's steps with other requests",
    advice: "Its steps had tokens of others, and there were steps without it: see the chunks below.",
  },
  failover: {
    short: "failover",
    sentence: "waited because a worker was lost, or refused it",
    advice: "See which attempt ended, and how, below.",
  },
  stalled_client: {
    short: "client stalled",
    sentence: "waited for its client, which did not read",
    advice: "The fleet was ready; the client or the network to it was slow.",
  },
  worker: {
    short: "on a worker",
    sentence: "was on a worker that has not told what it did",
    advice: "A worker tells it when the request has ended there.",
  },
  network: {
    short: "network, other",
    sentence: "was on its way between client, router and worker",
    advice: "No stage explains this time; it was spent between them.",
  },
};

/** The longest part. @param {RequestDetail} request */
export function longestPart(request) {
  /** @type {Map<string, {duration: number, notes: Set<string>}>} */
  const sums = new Map();
  for (const { part, duration_s, note } of request.ttft_parts) {
    const sum = sums.get(part) ?? { duration: 0, notes: new Set() };
    sum.duration += duration_s;
    if (note) sum.notes.add(note);
    sums.set(part, sum);
  }
  const [longest] = [...sums].sort(([, one], [, other]) => other.duration - one.duration);
  return longest === undefined ? null : { part: longest[0], ...longest[1] };
}

/** Time that the parts cover. @param {RequestDetail} request */
export function coveredS(request) {
  return request.ttft_s ?? request.ttft_parts.reduce((sum, { duration_s }) => sum + duration_s, 0);
}

/** The part that the request's time is blamed on; "" if none is. @param {RequestDetail} request */
export function blamed(request) {
  if (isRefusedAtOnce(request)) return "";
  return request.cause === "stalled_client" ? "stalled_client" : (longestPart(request)?.part ?? "");
}

/**
 * The parts in order of time. Short ways between them are added up at the end, as one without a place in time.
 * @param {RequestDetail} request
 * @returns {{part: string, start_s: number | null, duration_s: number, note: string}[]}
 */
export function shownParts(request) {
  const least = SHORT_SHARE * coveredS(request);
  const isShort = (/** @type {{part: string, duration_s: number}} */ { part, duration_s }) => part === "network" && duration_s < least;
  const short = request.ttft_parts.filter(isShort).reduce((sum, { duration_s }) => sum + duration_s, 0);
  const rest = { part: "network", start_s: null, duration_s: short, note: "between the other parts" };
  return [...request.ttft_parts.filter((part) => !isShort(part)), ...(short > 0 ? [rest] : [])];
}

/** What to do about it. @param {RequestDetail} request */
export function advice(request) {
  if (request.is_failed) return refusalAdvice(request);
  const part = blamed(request);
  const notes = part === "worker" ? [...(longestPart(request)?.notes ?? [])] : []; // why there is no timeline
  return [CAUSES[part]?.advice ?? "", ...notes.map((note) => `${note}.`)].join(" ");
}

/** How far a request came. @param {RequestDetail} request @param {number} whole */
function outcome(request, whole) {
  const first = request.ttft_s === null ? "" : `First token after ${duration(request.ttft_s)}.`;
  if (request.is_failed) return `${first} ${refusal(request)}`.trim();
  if (first !== "") return first;
  if (request.is_running) return `No token yet, ${duration(whole)} after the start.`;
  const ended = request.outcome === "cancelled" ? "Its client cancelled it" : "It ended";
  return `${ended} without a token, ${duration(request.e2e_s ?? whole)} after the start.`;
}

/** Says how far a request came, and where the time to first token went. @param {RequestDetail} request */
export function verdict(request) {
  const longest = longestPart(request);
  const whole = coveredS(request);
  const first = outcome(request, whole);
  const stall = request.stalled_s > 0 ? ` Its client did not read for ${duration(request.stalled_s)} in all.` : "";
  if (longest === null || whole <= 0 || request.cause === "stalled_client" || isRefusedAtOnce(request)) return first + stall;
  const words = CAUSES[longest.part]?.sentence ?? longest.part;
  const share = percent(longest.duration / whole);
  const until = request.is_failed && request.ttft_s !== null ? "the time to the first token" : "it";
  return `${first} For ${duration(longest.duration)} of ${until} (${share}) the request ${words}.${stall}`;
}
