"""Planning: predicts the speed of each setting from costs and acceptance measured apart, and finds the best one."""
