"""Training a student: objectives, batch order, engines, and the one loop they share."""
