"""Search over recipe settings with Ray Tune. Nothing is implemented here yet."""
