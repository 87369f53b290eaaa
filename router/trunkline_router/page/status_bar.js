/** The bar at the top: which router this is, and how fresh the data is. */

import { byId, setAttribute, setText } from "./dom.js";
import { duration } from "./format.js";

/** @typedef {import("./fleet_stream.js").Connection} Connection */

/** @type {Record<Connection["freshness"], string>} */
const MARKS = { connecting: "…", live: "●", stale: "⚠", refused: "✕" };

export class StatusBar {
  /** @param {(message: string) => void} announce */
  constructor(announce) {
    this.announce = announce;
    this.router = byId("router-name");
    this.freshness = byId("freshness");
    /** @type {Connection["freshness"]} */
    this.before = "connecting";
  }

  /** @param {import("./fleet_view").FleetView} view */
  showRouter({ router, you }) {
    const redis = router.redis === "lost" ? "⚠ Redis lost" : "";
    const caller = [you.tenant && `tenant ${you.tenant}`, you.is_operator && "operator"].filter(Boolean).join(", ");
    const parts = [router.name, router.version && `version ${router.version}`, router.policy, redis, caller];
    setText(this.router, parts.filter(Boolean).join(" · "));
  }

  /** @param {Connection} connection */
  showConnection(connection) {
    setAttribute(this.freshness, "data-freshness", connection.freshness);
    setText(this.freshness, `${MARKS[connection.freshness]} ${words(connection)}`);
    setAttribute(document.body, "data-freshness", connection.freshness);
    if (connection.freshness !== this.before && connection.freshness !== "connecting") {
      if (connection.freshness === "stale") this.announce("The data is old: the connection to the router is lost");
      else if (connection.freshness === "refused") this.announce("The router refused the caller");
      else if (this.before === "stale") this.announce("The data is live again");
    }
    this.before = connection.freshness;
  }
}

/** @param {Connection} connection */
function words({ freshness, problem, dataAt, retryAt }) {
  if (freshness === "live") return "Live";
  if (freshness === "refused") return "Not allowed";
  const wait = Math.max(0, retryAt - performance.now()) / 1000;
  const again = retryAt > 0 ? `, trying again in ${Math.ceil(wait)} s` : "";
  const why = problem === "" ? "" : `: ${problem}${again}`;
  if (freshness === "connecting") return `Connecting${why || " …"}`;
  const age = (performance.now() - dataAt) / 1000;
  return `Stale for ${age < 100 ? `${Math.round(age)} s` : duration(age)}${why}`;
}
