package bookmender;

import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import org.apache.bookkeeper.client.BKException;

/** Errors of the Java client as short names. */
final class Errors {
    private Errors() {}

    /** What lies under the wrappers that futures put around an error. */
    static Throwable cause(Throwable error) {
        boolean isWrapper = error instanceof CompletionException || error instanceof ExecutionException;
        return isWrapper && error.getCause() != null ? cause(error.getCause()) : error;
    }

    /** {@code BKLedgerFencedException}, or for what is not BookKeeper's own, the message as well. */
    static String name(Throwable error) {
        Throwable cause = cause(error);
        String name = cause.getClass().getSimpleName();
        return cause instanceof BKException ? name : name + ": " + cause.getMessage();
    }

    static boolean isNoSuchLedger(Throwable error) {
        return cause(error) instanceof BKException failure
                && failure.getCode() == BKException.Code.NoSuchLedgerExistsOnMetadataServerException;
    }
}
