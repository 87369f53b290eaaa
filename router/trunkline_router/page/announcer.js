/** Says changes of state to screen readers, at most one message in a while: numbers that change each second are not said. */

const PAUSE_MS = 4_000;

export class Announcer {
  /** @param {Element} region  an element with aria-live="polite" */
  constructor(region) {
    this.region = region;
    /** @type {string[]} */
    this.waiting = [];
    this.saidAt = -Infinity;
    this.timer = 0;
  }

  /** @param {string} message */
  say(message) {
    if (!this.waiting.includes(message)) this.waiting.push(message);
    clearTimeout(this.timer);
    const pause = Math.max(0, this.saidAt + PAUSE_MS - performance.now());
    this.timer = setTimeout(() => this.#speak(), pause);
  }

  /** Forgets what was said and what waits. */
  clear() {
    clearTimeout(this.timer);
    this.waiting = [];
    this.region.textContent = "";
  }

  #speak() {
    this.region.textContent = this.waiting.join(". ");
    this.waiting = [];
    this.saidAt = performance.now();
  }
}
