"""Steps of the model as data: how plans are made, checked, stored and bound, and what runs them."""
