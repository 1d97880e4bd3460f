package postgres

import "testing"

func TestAnExchangeForgetsTheAnswerBefore(t *testing.T) {
	var x exchange
	x.answer(7, []byte("-5"), []byte("1"))
	if x.pid != 7 || x.mark != -5 || string(x.result) != "1" {
		t.Fatalf("%+v", x)
	}
	if x.reset(false); x.pid != 0 || x.mark != 0 || len(x.result) > 0 {
		t.Errorf("left: %+v", x)
	}
}
