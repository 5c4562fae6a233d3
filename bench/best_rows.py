"""The best of several rounds, by operation and size, since a busy machine only makes a measurement worse."""


def keep_best(best, rows):
    """Lowers best[(operation, bytes)], in microseconds, to what a round's rows say."""
    for row in rows:
        key = (row["operation"], row["bytes"])
        best[key] = min(best.get(key, float("inf")), row["us"])
