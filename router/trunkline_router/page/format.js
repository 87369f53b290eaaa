/** Numbers as text, with units. Unknown values are shown as a dash. */

export const UNKNOWN = "–";

/** @param {number | null | undefined} value @returns {value is number} */
function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/**
 * A count: 950, 1,250, 48.2 k, 3.1 M.
 * @param {number | null | undefined} value
 */
export function count(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (Math.abs(value) >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Math.round(value).toLocaleString("en-US");
}

/**
 * A rate or another number that may be below ten: 0.4, 8.2, 31.
 * @param {number | null | undefined} value
 */
export function decimal(value) {
  if (!isKnown(value)) return UNKNOWN;
  return Math.abs(value) < 10 && value !== Math.round(value) ? value.toFixed(1) : count(value);
}

/**
 * A share: 0.974 is 97 %.
 * @param {number | null | undefined} value  0 to 1
 */
export function percent(value) {
  if (!isKnown(value)) return UNKNOWN;
  const shown = value * 100;
  return shown > 0 && shown < 1 ? "< 1 %" : `${Math.round(shown)} %`;
}

/**
 * A duration: < 0.1 ms, 0.4 ms, 12 ms, 1.32 s, 41 s, 3 min 5 s.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const size = Math.abs(seconds);
  if (size === 0) return "0 ms";
  if (size < 0.00005) return "< 0.1 ms";
  if (size < 0.00995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (size < 0.9995) return `${Math.round(seconds * 1e3)} ms`;
  if (size < 9.995) return `${seconds.toFixed(2)} s`;
  if (size < 99.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(size / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(size % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/**
 * A size in bytes: 512 B, 1.5 MiB.
 * @param {number | null | undefined} bytes
 */
export function size(bytes) {
  if (!isKnown(bytes)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let shown = bytes;
  let unit = 0;
  while (shown >= 1024 && unit < units.length - 1) {
    shown /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? shown : shown.toFixed(1)} ${units[unit]}`;
}

/**
 * The time of day in the browser's zone: 03:12:45.
 * @param {number} unixSeconds
 */
export function timeOfDay(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}
