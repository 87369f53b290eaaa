/** Lists of facts: a name, a value, and what qualifies it. */

import { h, KeyedList, setText } from "./dom.js";

export class Facts {
  constructor() {
    this.element = h("dl", { class: "tile-facts" });
    /** @type {KeyedList<[string, string, string], {element: Element, value: Element, note: Element}>} */
    this.list = new KeyedList(
      this.element,
      ([name]) => name,
      ([name]) => {
        const value = h("span", { class: "value" });
        const note = h("span", { class: "quiet small" });
        return { element: h("div", {}, h("dt", {}, name), h("dd", {}, value, " ", note)), value, note };
      },
      (shown, [, value, note]) => {
        setText(shown.value, value);
        setText(shown.note, note);
      },
    );
  }

  /** @param {[string, string, string][]} facts */
  show(facts) {
    this.list.show(facts);
  }
}
