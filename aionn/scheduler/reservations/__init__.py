"""The parts of reservations beside the admission test: phases, counter-offers, the enforcement of phases."""
