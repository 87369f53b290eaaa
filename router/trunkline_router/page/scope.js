/** What of the page is of this router alone, and what of its whole fleet. */

import { count } from "./format.js";

/** @typedef {import("./fleet_view").RouterView} RouterView @typedef {import("./fleet_view").OtherRouters} OtherRouters */

/**
 * Whose requests a list has.
 * @param {RouterView} router
 * @param {OtherRouters | null} others  that were asked; null: not yet
 */
export function requestsScope(router, others) {
  if (router.redis === "none") return "Requests of this router: without Redis it knows of no other.";
  if (!router.asks_routers) {
    return "⚠ Requests of this router alone: it asks no others without a fleet secret, a grant key or a password of Redis.";
  }
  if (router.redis === "lost") return "⚠ Redis is lost: these are the requests of this router alone.";
  if (others === null) return "Requests of this router; the others are being asked.";
  if (others.alive === 0) return "Requests of this router: no other one is alive.";
  const silent = others.alive - others.answered;
  const processes = others.alive === 1 ? "one other router process" : `${count(others.alive)} other router processes`;
  if (silent <= 0) return `Requests of the fleet: of this router and of ${processes}.`;
  return `⚠ Of ${processes}, ${count(silent)} did not answer: their requests are missing.`;
}

/** Whose load the plots show. @param {string} worker  "" for all  @param {number} keepsS */
export function loadScope(worker, keepsS) {
  if (worker !== "") return "This worker, with the requests of every router, since the page was opened.";
  const minutes = count(keepsS / 60);
  return `Sums over all workers of this router process, with the requests of every router. It keeps ${minutes} minutes.`;
}
