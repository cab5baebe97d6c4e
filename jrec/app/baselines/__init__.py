"""What any model has to beat: logistic regression on the same features, and the click rate of one feature's values."""
