/** Why a request was refused or failed, in words. */

import { duration } from "./format.js";

/** @typedef {import("./fleet_view").RequestSummary} RequestSummary */

/** A refusal that took less waited for nothing: where its time went explains nothing. */
const WAITED_S = 0.1;

/**
 * Stage → when it refused a request, or what it did when the request failed.
 * @type {Record<string, string>}
 */
export const STAGES = {
  arrival: "on its arrival, because the router was stopping",
  checks: "when its parameters and its length were checked",
  model: "when its model was looked for",
  tokenizer: "when its prompt was tokenized",
  quotas: "when its tenant's quotas were checked",
  placement: "when a worker was chosen for it",
  worker: "on its worker",
  client: "because its client read too slowly",
};

/**
 * Reason of the error table → what to do.
 * @type {Record<string, string>}
 */
const ADVICE = {
  INVALID_REQUEST: "The client must change the request: the answer tells it what is wrong.",
  CONTEXT_LENGTH_EXCEEDED: "Prompt and max_tokens are more than the model's context, or than the KV pool of a worker holds.",
  MODEL_NOT_FOUND: "No worker has served a model of that name to this router.",
  FORBIDDEN: "The credentials do not allow it: the answer tells the client what they lack.",
  OVERLOADED: "The fleet is short of compute, unless the client read too slowly: see Workers.",
  QUOTA_EXCEEDED: "See Tenants for what the tenant has used.",
  NO_WORKER: "No worker was ready, or all attempts were lost: see Workers, and the attempts below.",
  DEADLINE_EXCEEDED: "The client's deadline passed in this stage.",
  QUARANTINED: "Workers died while they computed this request: see the attempts, and the router's log.",
  INTERNAL: "This is a bug: the router's log has it under the request's id.",
};

/** Whether a request was refused before its first token. @param {RequestSummary} request */
export function isRefused(request) {
  return request.is_failed && request.ttft_s === null;
}

/** Whether it was refused without having waited. @param {RequestSummary} request */
export function isRefusedAtOnce(request) {
  return isRefused(request) && (request.e2e_s ?? 0) < WAITED_S;
}

/** Says why a failed request failed. @param {RequestSummary} request */
export function refusal(request) {
  const field = request.refused_field === "" ? "" : ` (${request.refused_field})`;
  const stage = STAGES[request.refused_by] ?? request.refused_by;
  const what = isRefused(request) ? "It was refused" : "The answer broke off";
  return `${what} ${duration(request.e2e_s)} after the start, ${stage}: ${request.outcome}${field}.`;
}

/** @param {RequestSummary} request */
export function refusalAdvice(request) {
  return ADVICE[request.outcome] ?? "";
}
