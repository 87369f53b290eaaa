/** Why a request found little of its prompt in a cache, in words. */

import { percent } from "./format.js";

/** @typedef {import("./fleet_view").RequestSummary} RequestSummary */

/**
 * Reason → its name in a table, what happened to the tokens that earlier prompts had too, and what to do.
 * @type {Record<string, {short: string, sentence: (seen: string) => string, advice: string}>}
 */
export const MISSES = {
  new: {
    short: "new",
    sentence: (seen) => (seen === "" ? "No earlier prompt begins like this one." : `Earlier prompts share ${seen}; the rest is new.`),
    advice: "",
  },
  changed: {
    short: "changed",
    sentence: (seen) =>
      seen === ""
        ? "The conversation has earlier turns, but no earlier prompt begins like this one."
        : `The conversation has earlier turns, but earlier prompts share only ${seen}.`,
    advice:
      "See what the client writes there: often a date or an id that changes in each turn. Turns that this router process has not served, or has forgotten, count as changed, too.",
  },
  computing: {
    short: "computing",
    sentence: (seen) => `The worker was still computing ${seen} for another request.`,
    advice: "",
  },
  other_worker: {
    short: "other worker",
    sentence: (seen) => `Another worker had ${seen}.`,
    advice: "It was too busy, or took no requests: compare the workers below.",
  },
  evicted: {
    short: "evicted",
    sentence: (seen) => `Workers had computed ${seen}, but had dropped it since.`,
    advice: "The KV pool is too small for all conversations that go on.",
  },
  lost: {
    short: "worker lost",
    sentence: (seen) => `The worker that had computed ${seen} was lost or restarted.`,
    advice: "",
  },
};

/** A row's cell: the reason and, where the prompt itself is why, from which token on. @param {RequestSummary} request */
export function shortMiss(request) {
  const miss = MISSES[request.cache_miss]?.short ?? request.cache_miss;
  const isPrompts = request.cache_miss === "new" || request.cache_miss === "changed";
  return isPrompts && request.seen_tokens > 0 ? `${miss} after ${exact(request.seen_tokens)}` : miss;
}

/** Says why, and what to do about it; "" if the cache had enough. @param {RequestSummary} request */
export function missSentence(request) {
  const miss = MISSES[request.cache_miss];
  if (miss === undefined) return request.cache_miss;
  const { seen_tokens: tokens, prompt_tokens: all } = request;
  const seen = tokens === 0 ? "" : `the first ${exact(tokens)} of its ${exact(all)} tokens (${percent(tokens / all)})`;
  return `${miss.sentence(seen)} ${miss.advice}`.trim();
}

/** How many requests of a list missed the cache, by reason; "" if none did. @param {RequestSummary[]} requests */
export function missCounts(requests) {
  const shorts = requests.filter(({ cache_miss }) => cache_miss !== "").map(({ cache_miss }) => MISSES[cache_miss]?.short ?? cache_miss);
  const counts = [...new Set(shorts)].sort().map((short) => `${short} ${shorts.filter((one) => one === short).length}`);
  return counts.length > 0 ? `${shorts.length} of these ${requests.length} found little in a cache: ${counts.join(", ")}.` : "";
}

/** @param {number} tokens */
function exact(tokens) {
  return tokens.toLocaleString("en-US");
}
