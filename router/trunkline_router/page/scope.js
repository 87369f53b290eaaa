/** Whose requests and whose load the page shows. */

import { count } from "./format.js";

/**
 * Whose requests a list has.
 * @param {import("./fleet_view").RouterView} router
 */
export function requestsScope(router) {
  if (router.redis === "none") return "Requests of this router: without Redis it knows of no other.";
  if (router.redis === "lost") return "⚠ Requests of this router: Redis is lost, so it knows of no other.";
  if (router.other_routers === 0) return "Requests of this router: no other one is alive.";
  const others = router.other_routers === 1 ? "One other router process is" : `${count(router.other_routers)} other router processes are`;
  return `Requests of this router. ${others} alive: the log line and the trace of a request name the router that served it.`;
}

/** Whose load the plots show. @param {string} worker  "" for all  @param {number} keepsS */
export function loadScope(worker, keepsS) {
  if (worker !== "") return "This worker, with the requests of every router, since the page was opened.";
  const minutes = count(keepsS / 60);
  return `Sums over all workers of this router process, with the requests of every router. It keeps ${minutes} minutes.`;
}
