"""How a row of channels is split over threads and CTAs. Imports nothing: specs and kernels share it."""

VECTOR = 8  # elements of a row that a thread owns
THREADS = (32, 64, 128, 256, 512, 1024)  # per CTA
CLUSTERS = (1, 2, 4, 8)  # CTAs per row
MIN_THREADS = 128
# Up to here eight CTAs per row pay off; with more rows, launching twice as many CTAs costs more than it saves.
FEW_TOKENS = 8
TOKEN_CLASSES = (FEW_TOKENS, FEW_TOKENS + 1)  # one number of tokens of each class that row_split tells apart


def row_split(hidden_size: int, num_tokens: int) -> dict[str, int]:
    """Threads per CTA and CTAs per row.

    One SM reads about 64 bytes a cycle, so a row spread over a cluster of SMs arrives sooner.
    """
    threads = hidden_size // VECTOR
    widest = 8 if num_tokens <= FEW_TOKENS else 4
    fitting = (size for size in CLUSTERS if size <= widest and threads // size >= MIN_THREADS)
    cluster = max(fitting, default=1)
    return {"threads": threads // cluster, "cluster": cluster}


def thread_vectors(part: int, thread: int, threads: int, width: int) -> tuple[int, ...]:
    """The vectors of `width` elements that thread `thread` of CTA `part` of a row owns.

    Neighbouring threads own neighbouring vectors, so each of the thread's accesses is contiguous over its warp.
    """
    count = VECTOR // width
    return tuple((part * count + i) * threads + thread for i in range(count))
