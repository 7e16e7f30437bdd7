"""A storage root over months: what goes on in it, what takes its space, and what can go."""
