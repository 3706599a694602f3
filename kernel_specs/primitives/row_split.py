"""How a row of channels is split over threads and CTAs. Imports nothing: specs and kernels share it."""

# Elements a thread owns: one 16-byte BF16 vector, two 16-byte FP32 vectors.
VECTOR = 8
THREADS = (32, 64, 128, 256, 512, 1024)
CLUSTERS = (1, 2, 4, 8)


def row_split(hidden_size: int, min_threads: int = 128) -> dict[str, int]:
    """Threads per CTA and CTAs per row: the widest cluster whose CTAs keep at least `min_threads` threads.

    One SM reads about 64 bytes a cycle, so a row spread over a cluster of SMs arrives sooner.
    """
    threads = hidden_size // VECTOR
    cluster = max(size for size in CLUSTERS if size == 1 or threads // size >= min_threads)
    return {"threads": threads // cluster, "cluster": cluster}
