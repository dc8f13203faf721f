"""From a model to a plan: which operation goes to which device, the steps made ready there, and what stands in for them."""
