/** A bar whose parts have the lengths of their shares. The text beside it says the same, so that it is hidden from
 *  screen readers. */

import { h } from "./dom.js";

export class ShareBar {
  /** @param {string[]} parts  the classes of its parts, from left to right */
  constructor(parts) {
    this.parts = parts.map((name) => h("span", { class: `bar-part ${name}` }));
    this.element = h("div", { class: "share-bar", "aria-hidden": "true" }, ...this.parts);
  }

  /** @param {(number | null)[]} sizes  of the parts;  @param {number} [whole]  the whole bar's; the sum, if left out */
  show(sizes, whole = sizes.reduce((/** @type {number} */ sum, size) => sum + (size ?? 0), 0)) {
    this.parts.forEach((part, index) => {
      const share = whole > 0 ? Math.min(1, (sizes[index] ?? 0) / whole) : 0;
      part.style.width = `${(share * 100).toFixed(2)}%`;
    });
  }
}
