/** Keeps one stream of the fleet's state open: connects, connects again after a loss, and tells how fresh the data is. */

import { Refused } from "./api.js";
import { serverEvents } from "./sse.js";

/**
 * "connecting": before the first data;  "live": data is fresh;  "stale": the stream ended or is silent, what is shown is
 * old;  "refused": the router wants another key. A refused stream does not try again by itself.
 * @typedef {"connecting" | "live" | "stale" | "refused"} Freshness
 * @typedef {{freshness: Freshness, problem: string, refused: Refused | null, dataAt: number, retryAt: number}} Connection
 */

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 15_000;
/** The router sends a state each second. */
export const SILENCE_MS = 5_000;
const CHECK_MS = 1_000;

export class FleetStream {
  /**
   * @param {import("./api.js").Api} api
   * @param {string} path
   * @param {(event: import("./sse.js").ServerEvent) => void} take
   * @param {(connection: Connection) => void} tell  called at each change, and each second while the data is stale
   */
  constructor(api, path, take, tell) {
    this.api = api;
    this.path = path;
    this.take = take;
    this.tell = tell;
    /** @type {Connection} */
    this.connection = { freshness: "connecting", problem: "", refused: null, dataAt: 0, retryAt: 0 };
    /** @type {AbortController | null} */
    this.attempt = null;
    this.failures = 0;
    this.retry = 0;
    setInterval(() => this.#check(), CHECK_MS);
  }

  /** Connects now, with the key of now; an open stream is closed first. */
  open() {
    clearTimeout(this.retry);
    this.attempt?.abort();
    this.attempt = new AbortController();
    this.#set({ problem: "", refused: null, retryAt: 0, freshness: this.connection.dataAt ? "stale" : "connecting" });
    this.#read(this.attempt.signal);
  }

  /** Closes the stream and forgets that there was data. */
  close() {
    clearTimeout(this.retry);
    this.attempt?.abort();
    this.attempt = null;
    this.#set({ freshness: "connecting", problem: "", refused: null, dataAt: 0, retryAt: 0 });
  }

  /** @param {AbortSignal} signal */
  async #read(signal) {
    let problem = "the router closed the stream";
    try {
      const response = await this.api.get(this.path, { accept: "text/event-stream", signal });
      for await (const event of serverEvents(response)) {
        if (signal.aborted) return;
        if (event.event === "error") {
          problem = JSON.parse(event.data).error.message;
          break;
        }
        this.failures = 0;
        this.take(event);
        this.#set({ freshness: "live", problem: "", refused: null, dataAt: performance.now(), retryAt: 0 });
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.needsIdentity) {
        this.#set({ freshness: "refused", problem: error.message, refused: error, retryAt: 0 });
        return;
      }
      if (!(error instanceof Refused || error instanceof TypeError)) throw error;
      problem = error instanceof Refused ? error.message : "no connection to the router";
    }
    if (!signal.aborted) this.#again(problem);
  }

  /** @param {string} problem */
  #again(problem) {
    const delay = Math.min(FIRST_RETRY_MS * 2 ** this.failures, LAST_RETRY_MS) * (0.75 + Math.random() / 2);
    this.failures += 1;
    this.#set({ freshness: this.connection.dataAt ? "stale" : "connecting", problem, retryAt: performance.now() + delay });
    this.retry = setTimeout(() => this.open(), delay);
  }

  #check() {
    const { freshness, dataAt } = this.connection;
    if (freshness === "live" && performance.now() - dataAt > SILENCE_MS) {
      this.#set({ freshness: "stale", problem: "the router sends nothing" });
    } else if (freshness !== "live") this.tell(this.connection);
  }

  /** @param {Partial<Connection>} change */
  #set(change) {
    this.connection = { ...this.connection, ...change };
    this.tell(this.connection);
  }
}
