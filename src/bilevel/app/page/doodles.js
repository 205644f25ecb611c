// Five examples as strokes, one for each class.

const around = (count, shape) => Array.from({ length: count + 1 }, (_, i) => shape((2 * Math.PI * i) / count));
const at = (points) => points.map(([x, y]) => ({ x, y }));

export const DOODLES = {
  house: [
    at([[0.24, 0.48], [0.24, 0.82], [0.76, 0.82], [0.76, 0.48]]),
    at([[0.14, 0.52], [0.5, 0.18], [0.86, 0.52]]),
    at([[0.45, 0.82], [0.45, 0.62], [0.58, 0.62], [0.58, 0.82]]),
  ].map(dense),
  fish: [
    dense(at([[0.84, 0.32], [0.7, 0.5], [0.84, 0.68], [0.84, 0.32]])),
    around(40, (a) => ({ x: 0.42 + 0.28 * Math.cos(a), y: 0.5 + 0.2 * Math.sin(a) })),
    [{ x: 0.3, y: 0.45 }, { x: 0.305, y: 0.45 }],
  ],
  star: [
    dense(at([0, 2, 4, 1, 3, 0].map((i) => [0.5 + 0.36 * Math.sin(i * 1.2566), 0.53 - 0.36 * Math.cos(i * 1.2566)]))),
  ],
  heart: [
    around(48, (a) => ({
      x: 0.5 + 0.021 * 16 * Math.sin(a) ** 3,
      y: 0.47 - 0.021 * (13 * Math.cos(a) - 5 * Math.cos(2 * a) - 2 * Math.cos(3 * a) - Math.cos(4 * a)),
    })),
  ],
  key: [
    around(32, (a) => ({ x: 0.3 + 0.14 * Math.cos(a), y: 0.5 + 0.14 * Math.sin(a) })),
    dense(at([[0.44, 0.5], [0.86, 0.5], [0.86, 0.66]])),
    dense(at([[0.72, 0.5], [0.72, 0.64]])),
  ],
};

// Add points on straight lines. Otherwise the pad would round the corners.
function dense(points) {
  const all = [];
  for (let i = 0; i + 1 < points.length; i++) {
    const [a, b] = [points[i], points[i + 1]];
    for (let t = 0; t < 1; t += 0.08) all.push({ x: a.x + t * (b.x - a.x), y: a.y + t * (b.y - a.y) });
  }
  return [...all, points.at(-1)];
}
